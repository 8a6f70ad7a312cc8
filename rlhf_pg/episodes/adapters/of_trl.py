"""TRL's environments: objects whose public methods are tools that share their state."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import call_concurrently
from rlhf_pg.data.chat import text_of
from rlhf_pg.data.prompts import Schemas
from rlhf_pg.episodes.environment import Messages, SettlingEnvironment
from rlhf_pg.episodes.tools import EnvironmentSource, Tool, Toolbox, ToolEnvironment

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
        self,
        tokenizer: PreTrainedTokenizerBase,
        timeout: float,
        tools: Sequence[Tool],
    ) -> dict[str, Any]:
        """Return the options of an `EpisodeRunner`; its tools are the methods and `tools`."""
        boxes = dict[Any, Toolbox]()
        for name, sample in self.samples.items():
            methods = _methods(sample).values()
            offered = [*tools, *methods]
            boxes[name] = Toolbox.of(offered, tokenizer, timeout)

        def schemas_of(row: Mapping[str, Any]) -> Schemas:
            name = row.get(COLUMN)
            if name not in boxes:
                raise ValueError(
                    f"its column '{COLUMN}' has {show(name)}, but "
                    f"environment_factory has {', '.join(map(str, boxes))}"
                )
            return boxes[name].schemas

        def make() -> TrlEnvironment:
            return TrlEnvironment(self.factories, boxes)

        return {
            "environment_factory": make,
            "timeout": None,  # each call has its own timeout
            "tools": boxes[None].schemas if None in boxes else schemas_of,
        }

    def add_prompts(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Add empty prompts to a dataset without prompts: `reset` brings them."""
        if dataset is None and None in self.samples:
            prompts = [PLACEHOLDER] * rows
            return Dataset.from_dict({"prompt": prompts})
        if isinstance(dataset, Dataset) and "prompt" not in dataset.column_names:
            prompts = [PLACEHOLDER] * len(dataset)
            return dataset.add_column("prompt", prompts)
        return dataset


class TrlEnvironment(ToolEnvironment, SettlingEnvironment):
    """The environment of one episode, which holds an instance of a TRL environment.

    Factories and toolboxes are given by name; `reset` makes the instance.
    """

    trl_instance: Any = None

    def __init__(self, factories: Mapping[Any, Any], boxes: Mapping[Any, Toolbox]) -> None:
        first = next(iter(boxes.values()))
        super().__init__(first)
        self.factories = factories
        self.boxes = boxes

    def reset(self, example: dict[str, Any]) -> Messages:
        """Reset an instance with the row, and append its text to the last message."""
        row = dict(example)
        name = None
        if None not in self.boxes:
            name = row.pop(COLUMN)
        self.trl_instance = self.factories[name]()
        self.toolbox = self.boxes[name]
        methods = _methods(self.trl_instance)
        self.functions = {**self.toolbox.functions, **methods}
        reset = self.trl_instance.reset
        parameters = inspect.signature(reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_all:
            row = {key: value for key, value in row.items() if key in parameters}
        call = call_concurrently(self.toolbox.timeout, reset, **row)
        text = call.result()
        if not isinstance(text, str | None):
            raise ValueError(f"reset must return a string or None, got {show(text)}")
        prompt = example["prompt"]
        if text and isinstance(prompt, str):
            prompt += text
        elif text:
            *before, last = prompt
            last = {**last, "content": text_of(last) + text}
            prompt = [*before, last]
        self.prompt = prompt
        return prompt  # type: ignore[no-any-return]

    def settle(self) -> Any:
        """Return the instance's reward for the episode, if it has one."""
        if not hasattr(self.trl_instance, "get_reward"):
            return None
        reward = call_concurrently(self.toolbox.timeout, self.trl_instance.get_reward)
        return reward.result()


def _methods(instance: Any) -> dict[str, Tool]:
    """Return the methods of an instance that are tools, by name."""
    methods = dict[str, Tool]()
    functions = inspect.getmembers(type(instance), inspect.isfunction)
    for name, _ in functions:
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        methods[name] = getattr(instance, name)
    return methods
