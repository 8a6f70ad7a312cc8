"""Environments as TRL has them: objects whose public methods are tools that share their state."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.boundary.user_code import call_beside, result_of
from rlhf_pg.rollout.multi_turn.environment import (
    EnvironmentSource,
    Messages,
    Schemas,
    SettlingEnvironment,
)
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, ToolEnvironment, check_template

COLUMN = "environment"  # names the factory of a row, where there are several
PLACEHOLDER = [{"role": "user", "content": ""}]  # the prompt where an environment has its own
# Of each factory by its name (None for a single one): it, its methods' names, and all its tools.
Equipment = Mapping[str | None, tuple[Callable[[], Any], Sequence[str], Toolbox]]


class TrlEnvironment(ToolEnvironment, SettlingEnvironment):
    """The environment of one episode, with an instance of TRL's kind of its own."""

    instance: Any = None

    def __init__(self, equipment: Equipment) -> None:
        self.equipment = equipment
        super().__init__(next(iter(equipment.values()))[2])

    def reset(self, example: dict[str, Any]) -> Messages:
        """Reset an instance with the row, and append what it says to the last message."""
        row = dict(example)
        make, names, box = self.equipment[None if None in self.equipment else row.pop(COLUMN)]
        self.instance = make()
        methods = {name: getattr(self.instance, name) for name in names}
        self.toolbox = dataclasses.replace(box, functions={**box.functions, **methods})
        parameters = inspect.signature(self.instance.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        said = result_of(call_beside(box.timeout, self.instance.reset, **row))
        if not isinstance(said, str | None):
            raise ValueError(f"reset must return a string or None, got {shown(said)}")
        self.prompt = example["prompt"]
        if said and isinstance(self.prompt, str):
            self.prompt += said
        elif said:
            *before, last = self.prompt
            parts, text = last["content"], [{"type": "text", "text": said}]
            content = parts + said if isinstance(parts, str) else [*parts, *text]
            self.prompt = [*before, {**last, "content": content}]
        return self.prompt  # type: ignore[no-any-return]

    def settle(self) -> Any:
        """Return what the instance pays for the episode, if it does."""
        if not hasattr(self.instance, "get_reward"):
            return None
        return result_of(call_beside(self.toolbox.timeout, self.instance.get_reward))


class TrlEnvironments(EnvironmentSource):
    """Environments of TRL's kind as an `environment_factory`.

    Public methods but `reset` and `get_reward` are tools.

    Args:
        factory: makes an environment, a new one for every episode; or several factories, by the
            name that a row has in its column `environment`.
    """

    def __init__(self, factory: Callable[[], Any] | Mapping[str, Callable[[], Any]]) -> None:
        factories = factory if isinstance(factory, Mapping) else {None: factory}
        self.samples = {name: (make, make()) for name, make in factories.items()}
        self.pays = any(hasattr(sample, "get_reward") for _, sample in self.samples.values())

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return what plays with these environments, each with its methods and `tools`."""
        equipment = {}
        for name, (make, sample) in self.samples.items():
            functions = [own for own, _ in inspect.getmembers(type(sample), inspect.isfunction)]
            public = [own for own in functions if not own.startswith("_")]
            methods = [own for own in public if own not in ("reset", "get_reward")]
            box = Toolbox.of([*tools, *(getattr(sample, m) for m in methods)], tokenizer, timeout)
            if box.schemas:
                check_template(tokenizer, box.schemas)
            equipment[name] = (make, methods, box)
        single = None in equipment
        return {
            "environment_factory": partial(TrlEnvironment, equipment),
            "timeout": None,  # they have their own
            "tools": equipment[None][2].schemas if single else partial(_schemas_of, equipment),
            "special_tokens": any(box.reads_tokens for _, _, box in equipment.values()),
        }

    def prompted(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Return the dataset with empty prompts, if it has none: `reset` then brings them."""
        if dataset is None and None in self.samples:
            return Dataset.from_dict({"prompt": [PLACEHOLDER] * rows})
        if isinstance(dataset, Dataset) and "prompt" not in dataset.column_names:
            return dataset.add_column("prompt", [PLACEHOLDER] * len(dataset))
        return dataset


def _schemas_of(equipment: Equipment, row: Mapping[str, Any]) -> Schemas:
    """Return the schemas of the environment that a row names."""
    if row.get(COLUMN) not in equipment:
        raise ValueError(
            f"its column '{COLUMN}' says {shown(row.get(COLUMN))}, and environment_factory has "
            f"{', '.join(map(str, equipment))}"
        )
    return equipment[row[COLUMN]][2].schemas
