"""Environments as TRL has them: objects whose public methods are tools that share their state."""

import dataclasses
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.rollout.multi_turn.concurrent_calls import call_within
from rlhf_pg.rollout.multi_turn.environment import (
    EnvironmentSource,
    Messages,
    Observation,
    Schemas,
    SettlingEnvironment,
)
from rlhf_pg.rollout.multi_turn.episodes import Episode
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, ToolEnvironment, check_template

COLUMN = "environment"  # names the factory of a row, where there are several
PLACEHOLDER = [{"role": "user", "content": ""}]  # the prompt where an environment has its own


@dataclass(frozen=True)
class TrlFactory:
    """A factory of one class of TRL's environments.

    Attributes:
        make: makes an instance.
        sample: one instance, to look at.
        methods: names of the methods that are tools.
    """

    make: Callable[[], Any]
    sample: Any
    methods: Sequence[str]

    @property
    def pays(self) -> bool:
        """True if its instances reward their episode themselves, by `get_reward()`."""
        return callable(getattr(type(self.sample), "get_reward", None))


class Lease:
    """The right to one instance for the time of an episode and of its rewards.

    Attributes:
        clean: whether no call is still at work in the instance.
    """

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.clean = False


class Pool:
    """The instances of one factory, which are made once and reset often."""

    def __init__(self, factory: TrlFactory) -> None:
        self.factory = factory
        self._free = [factory.sample]
        self._lock = threading.Lock()

    def lease(self, holder: Any) -> Lease:
        """Return a free instance or a new one; it is free again once there is no holder."""
        with self._lock:
            free = self._free.pop() if self._free else None
        lease = Lease(self.factory.make() if free is None else free)
        weakref.finalize(holder, self._take_back, lease)
        return lease

    def _take_back(self, lease: Lease) -> None:
        if lease.clean:
            self._free.append(lease.instance)


@dataclass(frozen=True)
class Equipment:
    """The instances of one factory and the tools that they and the run offer."""

    pool: Pool
    box: Toolbox

    def tools_of(self, instance: Any) -> Toolbox:
        """Return the tools, with the methods of this instance among them."""
        methods = {name: getattr(instance, name) for name in self.pool.factory.methods}
        return dataclasses.replace(self.box, functions={**self.box.functions, **methods})


class TrlEnvironment(ToolEnvironment, SettlingEnvironment):
    """The environment of one episode with an instance of TRL's kind.

    Args:
        equipment: of every factory, by its name.
        several: whether the row names the factory.

    Attributes:
        instance: the user's own object; None before the episode is reset.
    """

    def __init__(self, equipment: Mapping[str | None, Equipment], several: bool) -> None:
        self.equipment, self.several = equipment, several
        self.own = next(iter(equipment.values()))
        self.lease: Lease | None = None
        super().__init__(self.own.box)

    @property
    def instance(self) -> Any:
        return None if self.lease is None else self.lease.instance

    def reset(self, example: dict[str, Any]) -> Messages:
        """Reset an instance with the row, and append what it says to the last message."""
        row = dict(example)
        self.own = self.equipment[row.pop(COLUMN) if self.several else None]
        self.lease = self.own.pool.lease(self)
        self.toolbox = self.own.tools_of(self.instance)
        wanted = _accepted(self.instance.reset, row)
        said = call_within(self.toolbox.timeout, self.instance.reset, **wanted)
        self.prompt = _appended(example["prompt"], said)
        self.lease.clean = True
        return self.prompt  # type: ignore[no-any-return]

    def step(self, completion: str) -> Observation:
        """Call the tools that a turn asks for."""
        with self._at_work():
            return super().step(completion)

    def settle(self) -> Any:
        """Return what the instance pays for the episode, if it does."""
        if not self.own.pool.factory.pays:
            return None
        with self._at_work():
            return call_within(self.toolbox.timeout, self.instance.get_reward)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keep the instance from being used again if a call in it is never over."""
        assert self.lease is not None
        self.lease.clean = False
        yield
        self.lease.clean = not self.late


@dataclass(frozen=True)
class TrlEnvironments(EnvironmentSource):
    """The source of TRL's environments.

    Attributes:
        factories: by the name that a row has in its column `environment`; a single one, for all
            rows, has the name None.
    """

    factories: Mapping[str | None, TrlFactory]

    @property
    def pays(self) -> bool:
        """True if one of them has a `get_reward`."""
        return any(factory.pays for factory in self.factories.values())

    @property
    def several(self) -> bool:
        """True if each row names its factory."""
        return None not in self.factories

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return what plays with these environments, each with its methods and `tools`."""
        equipment: dict[str | None, Equipment] = {}
        for name, factory in self.factories.items():
            methods = [getattr(factory.sample, method) for method in factory.methods]
            box = Toolbox.of([*tools, *methods], tokenizer, timeout)
            if box.schemas:
                check_template(tokenizer, box.schemas)
            equipment[name] = Equipment(Pool(factory), box)
        schemas = {name: own.box.schemas for name, own in equipment.items()}
        return {
            "environment_factory": partial(TrlEnvironment, equipment, self.several),
            "timeout": None,  # they have their own
            "tools": partial(_schemas_of, schemas) if self.several else schemas[None],
            "special_tokens": any(own.box.reads_tokens for own in equipment.values()),
        }

    def prompted(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Return the dataset with empty prompts, if it has none: `reset` then brings them."""
        if dataset is None:
            if self.several:
                raise ValueError(
                    "train_dataset: several environments need a dataset whose column "
                    f"'{COLUMN}' names that of each row"
                )
            return Dataset.from_dict({"prompt": [PLACEHOLDER] * rows})
        if isinstance(dataset, Dataset) and "prompt" not in dataset.column_names:
            return dataset.add_column("prompt", [PLACEHOLDER] * len(dataset))
        return dataset


def _schemas_of(schemas: Mapping[str | None, Schemas], row: Mapping[str, Any]) -> Schemas:
    """Return the schemas of the environment that a row names."""
    if row.get(COLUMN) not in schemas:
        raise ValueError(
            f"its column '{COLUMN}' says {shown(row.get(COLUMN))}, and environment_factory has "
            f"{', '.join(map(str, schemas))}"
        )
    return schemas[row[COLUMN]]


def environments_of(episodes: Sequence[Episode]) -> list[Any]:
    """Return the environments of episodes as users made them; none where there are only tools."""
    made: list[Any] = [episode.environment for episode in episodes]
    if all(type(environment) is ToolEnvironment for environment in made):
        return []
    return [one.instance if type(one) is TrlEnvironment else one for one in made]


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Select the columns that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _appended(prompt: Messages, said: Any) -> Messages:
    """Append what `reset` returned to the prompt, or to its last message."""
    if said is None:
        return prompt
    if not isinstance(said, str):
        raise ValueError(f"reset must return a string or None, got {shown(said)}")
    if isinstance(prompt, str):
        return prompt + said
    last = dict(prompt[-1])
    content = last["content"]
    parts = isinstance(content, list | tuple)
    last["content"] = [*content, {"type": "text", "text": said}] if parts else content + said
    return [*prompt[:-1], last]
