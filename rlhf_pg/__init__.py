"""Policy-gradient RL for language models."""

from importlib.metadata import version

from rlhf_pg.config import GRPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.trainers import Callback, GRPOTrainer, ReinforceTrainer, RLOOTrainer

__version__ = version("rlhf-pg")

__all__ = [
    "Callback",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
]
