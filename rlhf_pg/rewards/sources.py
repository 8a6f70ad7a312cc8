"""Sources of reward: what each takes and where it is called, looked up once."""

import functools
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.rewards.process import ProcessRewardModel
from rlhf_pg.rewards.reward_model import RewardModel

Score = float | None
Scores = Sequence[Score | Sequence[Score]]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
RewardSource: TypeAlias = RewardFunction | str | PathLike[str] | PreTrainedModel
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
Place: TypeAlias = Literal["trainer", "event loop", "worker"]

MODELS = (str, PathLike, PreTrainedModel)
LOGS = ("log_extra", "log_metric")
# A function with **kwargs gets these as well, as from TRL.
OF_TRL = ("trainer_state", "environments", *LOGS)


@dataclass(frozen=True)
class Source:
    """A reward function with its name and what its signature asks for.

    Attributes:
        asked: names of its parameters.
        takes_all: it has **kwargs, or no signature that could be read.
        options: names of the arguments that a `functools.partial` holds already, which nothing that
            is offered replaces.
        place: where it is called: plain functions in the trainer, async ones on its event loop, or
            plain ones in a worker process.
    """

    name: str
    function: RewardFunction
    asked: frozenset[str] = frozenset()
    takes_all: bool = True
    options: frozenset[str] = frozenset()
    place: Place = "trainer"

    @classmethod
    def of(cls, name: str, function: RewardFunction, workers: bool = False) -> "Source":
        """Look at the signature of a function; `workers` says that there are any."""
        asked, takes_all = _signature(function)
        place: Place = "trainer"
        if is_async(function):
            place = "event loop"
        elif workers and not is_model(function):
            place = "worker"
        options = function.keywords if isinstance(function, functools.partial) else ()
        return cls(name, function, asked, takes_all, frozenset(options), place)

    @property
    def who(self) -> str:
        """The name of the function in errors."""
        return f"reward function {self.name}"

    def wants(self, name: str, columns: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return whether the function takes what the trainer offers under a name.

        A user's function that names a column of the dataset means the column; a reward model, which
        takes no columns, does not.
        """
        if is_model(self.function):
            return name in self.asked
        by_kwargs = self.takes_all and bool(self.asked) and name in OF_TRL
        taken = name in columns or name in self.options
        return (name in self.asked or by_kwargs) and not taken

    def takes(self, name: str) -> bool:
        """Return whether the function takes an input or a column of the dataset."""
        return (self.takes_all or name in self.asked) and name not in self.options


def is_async(function: Any) -> bool:
    """Return whether a function, or the object's method that is called, is async."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_model(function: Any) -> bool:
    """Return whether a function is a reward model, which belongs on the trainer's device."""
    return isinstance(function, RewardModel | ProcessRewardModel)


def source_fingerprint(function: Any) -> str | None:
    """Return a fingerprint of the file that a function is written in; None if there is none."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        code = inspect.unwrap(function) if callable(function) else function
        file = inspect.getsourcefile(code if inspect.isroutine(code) else type(code))
        written = Path(file or "").read_bytes()
    except (TypeError, ValueError, OSError):  # an object that has every attribute wraps itself
        return None
    return hashlib.sha256(written).hexdigest()[:16]


def _signature(function: Any) -> tuple[frozenset[str], bool]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return frozenset(), True
    kinds = {parameter.kind for parameter in parameters.values()}
    return frozenset(parameters), inspect.Parameter.VAR_KEYWORD in kinds


def sources_of(
    functions: RewardSource | Sequence[RewardSource],
    processing_classes: Tokenizers,
    workers: bool,
    *options: Any,
) -> list[Source]:
    """Return the sources that a user has named, with a reward model made of each path and model.

    Args:
        options: of `RewardModel`, behind its tokenizer.

    Raises:
        ValueError: another number of tokenizers, or a reward model that cannot be used.
        TypeError: something that cannot be called.
    """
    given: Any = functions
    one = callable(given) or isinstance(given, MODELS)
    listed = [given] if one else list(given)
    tokenizers = _one_each(processing_classes, len(listed))
    made = [
        _function(source, tokenizer, *options)
        for source, tokenizer in zip(listed, tokenizers, strict=True)
    ]
    names = _unique_names(made)
    return [Source.of(name, call, workers) for name, call in zip(names, made, strict=True)]


def _one_each(tokenizers: Any, count: int) -> list[Any]:
    if not isinstance(tokenizers, list | tuple):
        return [tokenizers] * count
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes must have one entry per reward function, got "
            f"{len(tokenizers)} for {count}; None stands for a function's own"
        )
    return list(tokenizers)


def _function(
    source: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device | None,
    *options: Any,
) -> RewardFunction:
    if isinstance(source, MODELS):
        return RewardModel(source, tokenizer, device, *options)
    if isinstance(source, PeftModel):
        raise ValueError(
            "a reward model with an adapter cannot be scored: give merge_and_unload() of it"
        )
    if not callable(source):
        raise TypeError(f"reward_funcs must be callables or reward models, got {shown(source)}")
    function: RewardFunction = source
    return function


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return the name of each function or of its class; one that is taken gets a number."""
    names: list[str] = []
    for function in functions:
        name = own = getattr(function, "__name__", type(function).__name__)
        count = 1
        while name in names:
            count += 1
            name = f"{own}_{count}"
        names.append(name)
    return names
