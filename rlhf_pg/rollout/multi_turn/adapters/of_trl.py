"""TRL's environments: objects whose public methods are tools that share their state."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import call_beside
from rlhf_pg.data.chat import text_of
from rlhf_pg.data.prompts import Schemas
from rlhf_pg.rollout.multi_turn.environment import Messages, SettlingEnvironment
from rlhf_pg.rollout.multi_turn.tools import EnvironmentSource, Tool, Toolbox, ToolEnvironment

COLUMN = "environment"  # the column with the name of a row's factory, if there are several
PLACEHOLDER = [{"role": "user", "content": ""}]  # the prompt if `reset` brings its own


class TrlEnvironments(EnvironmentSource):
    """Environments in TRL's style: public methods except `reset` and `get_reward` are tools.

    Args:
        factory: makes a new environment for every episode; or a dict of factories by name, and the
            column `environment` has the name for each row.
    """

    def __init__(self, factory: Callable[[], Any] | Mapping[str, Callable[[], Any]]) -> None:
        self.factories = factory if isinstance(factory, Mapping) else {None: factory}
        self.samples = {name: make() for name, make in self.factories.items()}
        self.pays = any(hasattr(sample, "get_reward") for sample in self.samples.values())

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return the options of an `EpisodeRunner`; its tools are the methods and `tools`."""
        boxes = {
            name: Toolbox.of([*tools, *_methods(sample).values()], tokenizer, timeout)
            for name, sample in self.samples.items()
        }

        def schemas_of(row: Mapping[str, Any]) -> Schemas:
            if row.get(COLUMN) not in boxes:
                raise ValueError(
                    f"its column '{COLUMN}' has {show(row.get(COLUMN))}, but "
                    f"environment_factory has {', '.join(map(str, boxes))}"
                )
            return boxes[row[COLUMN]].schemas

        return {
            "environment_factory": lambda: TrlEnvironment(self.factories, boxes),
            "timeout": None,  # each call has its own timeout
            "tools": boxes[None].schemas if None in boxes else schemas_of,
        }

    def add_prompts(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Add empty prompts to a dataset without prompts: `reset` brings them."""
        if dataset is None and None in self.samples:
            return Dataset.from_dict({"prompt": [PLACEHOLDER] * rows})
        if isinstance(dataset, Dataset) and "prompt" not in dataset.column_names:
            return dataset.add_column("prompt", [PLACEHOLDER] * len(dataset))
        return dataset


class TrlEnvironment(ToolEnvironment, SettlingEnvironment):
    """The environment of one episode, which holds an instance of a TRL environment.

    Factories and toolboxes are given by name; `reset` makes the instance.
    """

    trl_instance: Any = None

    def __init__(self, factories: Mapping[Any, Any], boxes: Mapping[Any, Toolbox]) -> None:
        super().__init__(next(iter(boxes.values())))
        self.factories = factories
        self.boxes = boxes

    def reset(self, example: dict[str, Any]) -> Messages:
        """Reset an instance with the row, and append its text to the last message."""
        row = dict(example)
        name = None if None in self.boxes else row.pop(COLUMN)
        self.trl_instance = self.factories[name]()
        self.toolbox = self.boxes[name]
        self.functions = {**self.toolbox.functions, **_methods(self.trl_instance)}
        parameters = inspect.signature(self.trl_instance.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        said = call_beside(self.toolbox.timeout, self.trl_instance.reset, **row).result()
        if not isinstance(said, str | None):
            raise ValueError(f"reset must return a string or None, got {show(said)}")
        self.prompt = example["prompt"]
        if said and isinstance(self.prompt, str):
            self.prompt += said
        elif said:
            *before, last = self.prompt
            self.prompt = [*before, {**last, "content": text_of(last) + said}]
        return self.prompt  # type: ignore[no-any-return]

    def settle(self) -> Any:
        """Return the instance's reward for the episode, if it has one."""
        if not hasattr(self.trl_instance, "get_reward"):
            return None
        return call_beside(self.toolbox.timeout, self.trl_instance.get_reward).result()


def _methods(instance: Any) -> dict[str, Tool]:
    """Return the methods of an instance that are tools, by name."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    tools = [name for name in names if not name.startswith("_")]
    return {name: getattr(instance, name) for name in tools if name not in ("reset", "get_reward")}
