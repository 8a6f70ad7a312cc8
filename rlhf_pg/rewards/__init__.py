"""Rewards: functions and models that score completions, and how a reward model is trained."""

from rlhf_pg.rewards.bradley_terry import bradley_terry_loss as bradley_terry_loss
from rlhf_pg.rewards.bradley_terry import train_reward_model as train_reward_model
from rlhf_pg.rewards.process import ProcessRewardModel as ProcessRewardModel
from rlhf_pg.rewards.reward_model import RewardModel as RewardModel
from rlhf_pg.rewards.scores import sum_step_scores as sum_step_scores
from rlhf_pg.rewards.scoring import CallOptions as CallOptions
from rlhf_pg.rewards.scoring import Rewards as Rewards
from rlhf_pg.rewards.sources import RewardFunction as RewardFunction
from rlhf_pg.rewards.sources import RewardSource as RewardSource
