"""A task of another library, as the trainers take it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from datasets import Dataset

from rlhf_pg.rollout.multi_turn.environment import EnvironmentSource


class AdaptedTask(NamedTuple):
    """The arguments that a trainer needs for a task, under the names that it has for them.

    Attributes:
        train_dataset: has a column `prompt`.
        eval_dataset: likewise; None if the task has none.
        reward_funcs: reward functions; empty if only the environment pays.
        environment_factory: of the environments, which may pay and offer tools; None without.
        tools: functions that the policy may call; those of the environment are not among them.
    """

    train_dataset: Dataset
    eval_dataset: Dataset | None
    reward_funcs: list[Callable[..., Any]]
    environment_factory: EnvironmentSource | None
    tools: tuple[Callable[..., Any], ...]
