"""The algorithms: one loop in base.py, one file each."""

from rlhf_pg.trainers.base import PolicyGradientTrainer
from rlhf_pg.trainers.grpo import GRPOTrainer
from rlhf_pg.trainers.loop import Callback
from rlhf_pg.trainers.ppo import PPOTrainer
from rlhf_pg.trainers.reinforce import ReinforceTrainer
from rlhf_pg.trainers.rloo import RLOOTrainer
