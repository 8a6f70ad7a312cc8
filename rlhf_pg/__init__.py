"""Policy-gradient RL for language models."""

from rlhf_pg.config import GRPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.trainers import Callback, GRPOTrainer, ReinforceTrainer, RLOOTrainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
]
