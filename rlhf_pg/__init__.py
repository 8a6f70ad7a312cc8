"""Policy-gradient RL for language models."""

from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.trainers import Callback, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "GRPOConfig",
    "GRPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
]
