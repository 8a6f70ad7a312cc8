"""Policy-gradient RL for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: torch and transformers take seconds."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rlhf_pg import config

        if hasattr(config, name):
            return getattr(config, name)
        from rlhf_pg import rollout, trainers

        return getattr(trainers if hasattr(trainers, name) else rollout, name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
