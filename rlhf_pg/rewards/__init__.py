"""Rewards: functions and models that score completions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.rewards.reward_model import RewardModel as RewardModel
    from rlhf_pg.rewards.scores import sum_step_scores as sum_step_scores
    from rlhf_pg.rewards.scoring import Rewards as Rewards
    from rlhf_pg.rewards.verifiers import (
        accuracy_reward as accuracy_reward,
        think_format_reward as think_format_reward,
    )

    train_reward_model: Any  # of rlhf_pg.supervised, which stands above
else:
    MODULES = {
        "RewardModel": "rewards.reward_model",
        "sum_step_scores": "rewards.scores",
        "Rewards": "rewards.scoring",
        "accuracy_reward": "rewards.verifiers",
        "think_format_reward": "rewards.verifiers",
        "train_reward_model": "supervised.bradley_terry",
    }

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: worker processes do not need torch."""
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"rlhf_pg.{MODULES[name]}")
        if name == "accuracy_reward":
            module.make_verifier("math")  # or else say which package it needs
        return getattr(module, name)
