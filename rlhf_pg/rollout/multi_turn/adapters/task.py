"""A task of another library, as the trainers take it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.rollout.multi_turn.environment import EnvironmentSource, Schemas
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox


class AdaptedTask(NamedTuple):
    """The arguments that a trainer needs for a task, under the names that it has for them.

    Attributes:
        train_dataset: has a column `prompt`.
        eval_dataset: likewise; None if the task has none.
        environment_factory: of the environments, which pay and may offer tools.
        reward_funcs, tools: empty, since the environments bring both.
    """

    train_dataset: Dataset
    eval_dataset: Dataset | None
    environment_factory: EnvironmentSource
    reward_funcs: tuple[Callable[..., Any], ...] = ()
    tools: tuple[Callable[..., Any], ...] = ()


def own_tools(
    schemas: Schemas, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
) -> Toolbox:
    """Return a box of tools that an environment calls itself.

    Raises:
        ValueError: `tools` has further ones.
    """
    if tools:
        raise ValueError("tools: the environment has its own, give none")
    return Toolbox(functions={}, schemas=schemas, tokenizer=tokenizer, timeout=timeout)
