"""Rewards: functions and models that score completions, and how a reward model is trained."""

from rlhf_pg.rewards.bradley_terry import bradley_terry_loss, train_reward_model
from rlhf_pg.rewards.functions import RewardFunction, Rewards, RewardSource
from rlhf_pg.rewards.process import ProcessRewardModel
from rlhf_pg.rewards.reward_model import RewardModel
from rlhf_pg.rewards.scores import sum_step_scores
