"""A task of another library, as the trainers take it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.rollout.multi_turn.environment import EnvironmentSource, Schemas
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox


class AdaptedTask(NamedTuple):
    """The arguments that a trainer needs for a task, under the names that it has for them."""

    train_dataset: Dataset  # has a column `prompt`
    eval_dataset: Dataset | None
    environment_factory: EnvironmentSource  # its environments pay, and may offer tools
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
