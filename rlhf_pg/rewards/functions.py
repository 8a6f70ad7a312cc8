"""Reward functions: what one is given, one call of it, and the check of its answer.

Nothing heavy is imported, since every worker process imports this file.
"""

import asyncio
import copy
import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.boundary.user_code import finite, wait_for

LOGS = ("log_extra", "log_metric")
# A function with **kwargs gets these as well, as from TRL.
OF_TRL = ("trainer_state", "environments", *LOGS)
OWN_COLUMNS = {  # of completions.jsonl
    *("step", "prompt_index", "sample", "prompt", "completion", "advantage", "truncated"),
    *("turns", "error"),
}


class CallFailed(Exception):
    """The failure of a call; its text continues the name of the function ("raised KeyError")."""


class Answer(NamedTuple):
    """The answer of a call."""

    scores: list[Any]  # for each completion a number, None, or a list of these, one per token
    extra: dict[str, list[Any]]  # columns for completions.jsonl, one value per completion
    metrics: dict[str, list[float]]  # numbers for metrics.jsonl, by name


@dataclass(frozen=True)
class Source:
    """A reward function with its name and what its signature asks for."""

    name: str
    function: Any
    asked: frozenset[str] = frozenset()  # names of its parameters
    takes_all: bool = True  # it has **kwargs, or no signature that could be read
    bound: frozenset[str] = frozenset()  # arguments that a `functools.partial` holds already
    # A reward model, called once for all prompts; a plain function, in the trainer or in a worker;
    # an async one, on an event loop.
    kind: Literal["model", "plain", "worker", "async"] = "plain"

    @classmethod
    def of(cls, name: str, function: Any) -> "Source":
        """Look at the signature of a plain or an async function."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # some built-in functions have none
            return cls(name, function)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        bound = function.keywords if isinstance(function, functools.partial) else ()
        source = cls(name, function, frozenset(parameters), takes_all, frozenset(bound))
        of_class = getattr(function, "__call__", None)  # noqa: B004
        is_async = any(map(inspect.iscoroutinefunction, (function, of_class)))
        return replace(source, kind="async") if is_async else source


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Some completions as functions are shown them; every list has an entry per completion."""

    inputs: Mapping[str, Sequence[Any]]  # prompts, completions and completion_ids
    columns: Mapping[str, Sequence[Any]]  # the dataset's others
    facts: Mapping[str, Sequence[Any]]  # for functions that ask: ended, truncated, environments
    progress: dict[str, Any]  # for functions that ask: step, trainer_state

    def __len__(self) -> int:
        return len(self.inputs["completions"])

    def select(self, rows: Sequence[int]) -> "Shown":
        """Return what may be told of some of the completions."""
        parts = (self.inputs, self.columns, self.facts)
        inputs, columns, facts = (
            {name: [column[i] for i in rows] for name, column in part.items()} for part in parts
        )
        return replace(self, inputs=inputs, columns=columns, facts=facts)

    def arguments(self, source: Source) -> dict[str, Any]:
        """Return what a function takes; a plain or async one gets copies, but of environments.

        A column that has the name of a fact goes before it, but for a reward model.
        """
        facts = {**self.facts, **self.progress, **dict.fromkeys(LOGS)}
        both = (self.columns, facts) if source.kind == "model" else (facts, self.columns)
        offered = {**self.inputs, **both[0], **both[1]}
        by_kwargs = {*self.inputs, *self.columns, *OF_TRL} if source.takes_all else set()
        names = (offered.keys() & (source.asked | by_kwargs)) - source.bound
        if source.kind in ("model", "worker"):  # which changes nothing, or is sent copies
            return {name: offered[name] for name in names}
        return {x: offered[x] if x == "environments" else copy.deepcopy(offered[x]) for x in names}


def show(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    ended: Sequence[bool] | None = None,
    state: Any = None,
    truncated: Sequence[bool] | None = None,
    environments: Sequence[Any] | None = None,
) -> Shown:
    """Return what reward functions may be told of completions.

    Args:
        state: a `transformers.TrainerState`.

    Raises:
        ValueError: a column of the dataset has the name of an input.
    """
    inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    if taken := inputs.keys() & columns.keys():
        raise ValueError(
            f"the dataset column {taken.pop()!r} has the name of what reward functions are "
            "given: rename it"
        )
    facts = {"ended": ended, "truncated": truncated, "environments": environments}
    return Shown(
        inputs={name: list(column) for name, column in inputs.items()},
        columns=columns,
        facts={name: fact for name, fact in facts.items() if fact is not None},
        progress={} if state is None else {"step": state.global_step, "trainer_state": state},
    )


class Log:
    """The numbers and columns that a reward function logs in one call of `count` completions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions of the call.

        Raises:
            ValueError: there is not one value per completion, or the run has a column of that name.
        """
        if column in OWN_COLUMNS or column.startswith("rewards/"):
            raise ValueError(f"log_extra: the run itself has a column {column!r}: rename it")
        plain = [_plain(value) for value in _plain(values)]
        if len(plain) != self.count:
            raise ValueError(
                f"log_extra: column {column!r} has {len(plain)} values for {self.count} completions"
            )
        self.extra[column] = [x if _is_json(x) else shown(x) for x in plain]

    def log_metric(self, name: str, value: float) -> None:
        """Add a number, which is averaged over the calls and processes of a step."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def into(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with the log functions where a place is left for them."""
        places = [name for name in LOGS if name in arguments and arguments[name] is None]
        return {**arguments, **{name: getattr(self, name) for name in places}}


def call(source: Source, arguments: Mapping[str, Any], count: int) -> Answer:
    """Call a plain function on `count` completions, and wait if it returns an awaitable.

    Raises:
        CallFailed: it raised, or did not return one score per completion.
    """
    log = Log(count)
    try:
        said = source.function(**log.into(arguments))
        said = wait_for(said) if inspect.isawaitable(said) else said
    except (Exception, SystemExit) as error:
        raise CallFailed(f"raised {told(error)}") from error
    return Answer(read_scores(said, count), log.extra, log.metrics)


async def call_async(
    source: Source, arguments: Mapping[str, Any], count: int, timeout: float | None
) -> Answer:
    """Call an async function as `call` calls others; one that is late is cancelled.

    Raises:
        CallFailed: also, it took longer than `timeout` seconds.
    """
    log = Log(count)
    try:
        async with asyncio.timeout(timeout) as limit:
            said = await source.function(**log.into(arguments))
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        raise CallFailed(late(timeout) if limit.expired() else f"raised {told(error)}") from error
    return Answer(read_scores(said, count), log.extra, log.metrics)


def late(timeout: float | None) -> str:
    """Return what is said of a call that takes too long."""
    return f"did not return within {timeout:g} s (reward_timeout)"


def read_scores(said: Any, count: int) -> list[Any]:
    """Convert an answer (a list, tuple, array or tensor) to plain numbers, None and lists of them.

    Raises:
        CallFailed: there is not one entry per completion, or one is not a finite number.
    """
    try:
        scores = _plain(said)
        if isinstance(scores, list) and len(scores) == count:
            return [_read(score, f"completion {i}") for i, score in enumerate(scores)]
    except CallFailed:
        raise
    except Exception as error:  # a tensor without values, for example
        raise CallFailed(f"returned what cannot be read: {told(error)}") from error
    got = f"{len(scores)} scores" if isinstance(scores, list) else shown(said)
    raise CallFailed(f"must return a list of {count} scores, one per completion, got {got}")


def _read(score: Any, where: str) -> Any:
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


def _plain(said: Any) -> Any:
    said = said.tolist() if hasattr(said, "tolist") else said
    return list(said) if isinstance(said, Sequence) and not isinstance(said, str | bytes) else said


def _is_json(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float | bool)


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
