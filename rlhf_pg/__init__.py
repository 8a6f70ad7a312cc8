"""Policy-gradient RL for language models."""

from rlhf_pg.boundary import launcher as launcher  # before what takes seconds
from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.rollout import Environment, Observation
from rlhf_pg.trainers import Callback, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Environment",
    "GRPOConfig",
    "GRPOTrainer",
    "Observation",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
]
