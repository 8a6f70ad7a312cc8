"""A task of another library, as the trainers take it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.rollout.multi_turn.environment import EnvironmentSource, Schemas
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, check_template


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


def options_with_own_tools(
    environment: Callable[[Toolbox], Any],
    schemas: Schemas,
    tokenizer: PreTrainedTokenizerBase,
    timeout: float,
    tools: Sequence[Tool],
) -> dict[str, Any]:
    """Return a runner's options for environments that execute calls of their own tools.

    Raises:
        ValueError: `tools` has further ones, or the chat template cannot show them.
    """
    if tools:
        raise ValueError("tools: the environment has its own, give none")
    if schemas:
        check_template(tokenizer, schemas)
    box = Toolbox(functions={}, schemas=schemas, tokenizer=tokenizer, timeout=timeout)
    return {
        "environment_factory": partial(environment, box),
        "timeout": timeout,
        "tools": schemas,
        "special_tokens": bool(schemas) and box.reads_tokens,
    }
