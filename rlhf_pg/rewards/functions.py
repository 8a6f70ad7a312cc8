"""Reward functions: what one is given, one call of it, and the check of its scores.

Nothing heavy is imported, since every worker process imports this file.
"""

import asyncio
import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.boundary.user_code import finite, wait_for

SAMPLED = ("prompts", "completions", "completion_ids")  # given to every function
FACTS = ("ended", "truncated", "environments")  # given to those that ask
SHARED = ("environments", "log_extra", "log_metric")  # given to functions uncopied
OF_TRL = ("trainer_state", *SHARED)  # given to functions with **kwargs too, as by TRL
OWN_COLUMNS = {  # of completions.jsonl
    *("step", "prompt_index", "sample", "prompt", "completion", "advantage", "truncated"),
    *("turns", "error"),
}


class CallFailed(Exception):
    """The failure of a call; its text continues the name of the function ("raised KeyError")."""


@dataclass(frozen=True)
class Source:
    """A reward function with its name and what its signature asks for."""

    name: str
    function: Any
    asked: frozenset[str]  # names of its parameters
    takes_all: bool  # it has **kwargs
    bound: frozenset[str]  # arguments that a `functools.partial` holds already
    # A reward model, called once for all prompts; a plain function, in the trainer or in a worker;
    # an async one, on an event loop.
    kind: Literal["model", "plain", "worker", "async"]

    @classmethod
    def of(cls, name: str, function: Any) -> "Source":
        """Look at the signature of a plain or an async function."""
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        bound = function.keywords if isinstance(function, functools.partial) else ()
        of_class = getattr(function, "__call__", None)  # noqa: B004
        is_async = any(map(inspect.iscoroutinefunction, (function, of_class)))
        kind: Any = "async" if is_async else "plain"
        return cls(name, function, frozenset(parameters), takes_all, frozenset(bound), kind)


@dataclass(frozen=True)
class RewardInputs:
    """Completions and all that functions may be told of them, lists with an entry for each.

    A function gets what its signature names, and with **kwargs all but `ended`, `truncated` and
    `step`. A column of the dataset takes precedence.

    Raises:
        ValueError: a column of the dataset has the name of a list that every function is given.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]  # the dataset's others
    ended: Sequence[bool] | None = None  # by an EOS of the policy
    truncated: Sequence[bool] | None = None  # by a limit; a stop string sets neither
    environments: Sequence[Any] | None = None
    # A `transformers.TrainerState`: `step` is its number of steps so far, `trainer_state` has all
    # its fields, such as `global_step`, `max_steps` and `epoch`.
    state: Any = None

    def __post_init__(self) -> None:
        if taken := self.columns.keys() & SAMPLED:
            raise ValueError(
                f"the dataset column {taken.pop()!r} has the name of what reward functions are "
                "given: rename it"
            )

    def select(self, rows: Sequence[int]) -> "RewardInputs":
        """Return the inputs of some of the completions."""
        given = {name: getattr(self, name) for name in (*SAMPLED, *FACTS)}
        chosen = {
            name: [values[i] for i in rows] for name, values in given.items() if values is not None
        }
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, **chosen)

    def arguments(self, source: Source, answer: "Answer") -> dict[str, Any]:
        """Return what a function takes; what it logs goes into the answer."""
        offered = {name: getattr(self, name) for name in (*SAMPLED, *FACTS)}
        offered = {name: values for name, values in offered.items() if values is not None}
        if source.kind == "model":  # which needs no columns and changes nothing
            return offered
        offered |= {"log_extra": answer.log_extra, "log_metric": answer.log_metric}
        if self.state is not None:
            offered |= {"step": self.state.global_step, "trainer_state": self.state}
        if source.kind == "worker":
            offered.pop("environments", None)  # which cannot be sent
            if self.state is not None:  # whose class takes seconds to import
                offered["trainer_state"] = SimpleNamespace(**vars(self.state))
        offered |= self.columns
        by_kwargs = {*SAMPLED, *self.columns, *OF_TRL} if source.takes_all else set()
        names = (offered.keys() & (source.asked | by_kwargs)) - source.bound
        if source.kind == "worker":  # which is sent copies
            return {name: offered[name] for name in names}
        return {x: offered[x] if x in SHARED else copy.deepcopy(offered[x]) for x in names}


@dataclass
class Answer:
    """The scores of a call on `count` completions, and what the function has logged."""

    count: int
    scores: list[Any] = field(default_factory=list)  # as `read_scores` returns them
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns for completions.jsonl
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers for metrics.jsonl

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions of the call.

        Raises:
            ValueError: there is not one value per completion, or the run has a column of that name.
        """
        if column in OWN_COLUMNS or column.startswith("rewards/"):
            raise ValueError(f"log_extra: the run itself has a column {column!r}: rename it")
        values = list(_plain(values))
        if len(values) != self.count:
            raise ValueError(
                f"log_extra: column {column!r} has {len(values)} values for {self.count} "
                "completions"
            )
        self.extra[column] = json.loads(json.dumps(values, default=_as_json))

    def log_metric(self, name: str, value: float) -> None:
        """Add a number, which is averaged over the calls and processes of a step."""
        self.metrics.setdefault(str(name), []).append(float(value))


def call(function: Any, arguments: Mapping[str, Any], answer: Answer) -> Answer:
    """Call a plain function, and wait if it returns an awaitable.

    Raises:
        CallFailed: it raised, or did not return one score per completion.
    """
    try:
        returned = function(**arguments)
        returned = wait_for(returned) if inspect.isawaitable(returned) else returned
    except (Exception, SystemExit) as error:
        raise CallFailed(f"raised {told(error)}") from error
    return replace(answer, scores=read_scores(returned, answer.count))


async def call_async(
    function: Any, arguments: Mapping[str, Any], answer: Answer, timeout: float | None
) -> Answer:
    """Call an async function like `call`; after `timeout` seconds it is cancelled (CallFailed)."""
    try:
        async with asyncio.timeout(timeout) as limit:
            returned = await function(**arguments)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        raise CallFailed(late(timeout) if limit.expired() else f"raised {told(error)}") from error
    return replace(answer, scores=read_scores(returned, answer.count))


def late(timeout: float | None) -> str:
    """Return the failure of a call that takes too long."""
    return f"did not return within {timeout:g} s (reward_timeout)"


def read_scores(returned: Any, count: int) -> list[Any]:
    """Convert a list, tuple, array or tensor to plain numbers, None, and lists of these.

    Raises:
        CallFailed: there is not one entry per completion, or one is not a finite number.
    """
    try:
        scores = _plain(returned)
        is_list = isinstance(scores, list)
        if is_list and len(scores) == count:
            return [_read(score, f"completion {i}") for i, score in enumerate(scores)]
    except CallFailed:
        raise
    except Exception as error:  # a tensor without values, for example
        raise CallFailed(f"returned what cannot be read: {told(error)}") from error
    got = f"{len(scores)} scores" if is_list else shown(returned)
    raise CallFailed(f"must return a list of {count} scores, one per completion, got {got}")


def _read(score: Any, where: str) -> Any:
    """Convert the score of a completion, or a list of scores of its tokens."""
    steps = _plain(score)
    if isinstance(steps, list):
        return [_number(step, f"token {t} of {where}") for t, step in enumerate(steps)]
    return _number(score, where)


def _number(score: Any, where: str) -> float | None:
    if score is None:
        return None
    if (number := finite(score)) is None:
        raise CallFailed(
            f"returned {shown(score)} for {where} of the call: return a finite number, or None "
            "where the reward does not apply"
        )
    return number


def _plain(values: Any) -> Any:
    """Return an array, a tensor or another sequence as a list; anything else as it is."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return list(values) if is_sequence else values


def _as_json(value: Any) -> Any:
    """Return an array as a list, and what JSON does not know as text."""
    return value.tolist() if hasattr(value, "tolist") else shown(value)


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
