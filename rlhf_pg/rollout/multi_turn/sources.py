"""The sources of a run's environments."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.data.prompts import Schemas
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox


class EnvironmentSource:
    """The source of a run's environments.

    Args:
        factory: makes the environment of one episode; where there are schemas, it is given the
            `Toolbox` that reads the policy's calls.
        schemas: of tools that the environments call themselves.
    """

    pays = True  # whether "environment" is a source of reward

    def __init__(self, factory: Callable[..., Any], schemas: Schemas = ()) -> None:
        self.factory, self.schemas = factory, schemas

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return `environment_factory`, `timeout` and `tools` of an `EpisodeRunner`.

        Args:
            timeout: seconds for a call of an environment.
            tools: further functions that the policy may call.

        Raises:
            ValueError: there are tools where there can be none, or the chat template cannot show
                them.
        """
        if tools:
            raise ValueError(
                "give tools or environment_factory, not both: an environment can call what it likes"
            )
        factory = self.factory
        if self.schemas:
            factory = partial(factory, Toolbox(schemas=self.schemas, tokenizer=tokenizer))
        return {"environment_factory": factory, "timeout": timeout, "tools": self.schemas}

    def prompted(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Return the dataset with a column `prompt`, if environments bring the prompts themselves;
        `rows` rows stand for a dataset that is missing.
        """
        return dataset


def source_of(factory: Any) -> EnvironmentSource:
    """Return the source of a run's environments.

    Raises:
        ValueError: it can make none.
    """
    if isinstance(factory, EnvironmentSource):
        return factory
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "step")):
        raise ValueError(
            "environment_factory must make environments with reset(example) and step(completion), "
            f"got {shown(factory)}; those of TRL's kind go into "
            "rlhf_pg.rollout.multi_turn.adapters.TrlEnvironments"
        )
    return EnvironmentSource(factory)
