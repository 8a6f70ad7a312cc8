"""Reward functions: their arguments, one call, and the check of its scores.

Every worker process imports this file, so it has no slow imports.
"""

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from rlhf_pg.boundary.quoted import frames, show, tell
from rlhf_pg.boundary.user_code import CallFailed, begin, finite
from rlhf_pg.report.run_files import OWN_COLUMNS

SAMPLED = ("prompts", "completions", "completion_ids")  # arguments of every function
ON_REQUEST = {"ended", "truncated", "step"}  # arguments of functions that name them
UNCOPIED = {"environments", "log_extra", "log_metric"}


@dataclass(frozen=True)
class Source:
    """A reward function with its name and the arguments that it takes."""

    name: str
    function: Any
    parameters: Mapping[str, inspect.Parameter]
    # A reward model, called once for all prompts; a plain function in the trainer, or one in a
    # worker process; an async function, on an event loop.
    kind: Literal["model", "plain", "worker", "async"]

    @classmethod
    def of(cls, name: str, function: Any) -> "Source":
        kind: Any = "plain"
        if getattr(function, "is_reward_model", False):
            kind = "model"
        elif any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            kind = "async"
        return cls(name, function, inspect.signature(function).parameters, kind)


@dataclass(frozen=True)
class RewardInputs:
    """Completions and their data for reward functions, as lists with an entry for each.

    A function gets the arguments that it names, and with **kwargs all but `ON_REQUEST`. A column of
    the dataset takes precedence.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]  # the dataset's other columns
    ended: Sequence[bool] | None = None  # by an EOS of the policy
    truncated: Sequence[bool] | None = None  # by a limit; a stop string sets neither
    environments: Sequence[Any] | None = None
    state: Any = None  # a `transformers.TrainerState`, for `step` and `trainer_state`

    def lists(self) -> dict[str, Any]:
        """Return the completions and their data, without the columns."""
        lists = {}
        for name in (*SAMPLED, "ended", "truncated", "environments"):
            values = getattr(self, name)
            if values is not None:
                lists[name] = values
        return lists

    def select(self, rows: Sequence[int]) -> "RewardInputs":
        """Return the inputs of some of the completions."""

        def pick(table: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            return {name: [values[i] for i in rows] for name, values in table.items()}

        return replace(self, columns=pick(self.columns), **pick(self.lists()))

    def arguments(self, source: Source, answer: "CallResult") -> dict[str, Any]:
        """Return a function's arguments; its logged values go into the answer."""
        offered = self.lists()
        if source.kind == "model":  # needs no columns, and does not change its arguments
            return offered
        offered |= {"log_extra": answer.log_extra, "log_metric": answer.log_metric}
        if self.state is not None:
            offered |= {"step": self.state.global_step, "trainer_state": self.state}
        if source.kind == "worker":
            offered.pop("environments", None)  # they cannot be sent
            if self.state is not None:  # its class takes seconds to import
                offered["trainer_state"] = SimpleNamespace(**vars(self.state))
        offered |= self.columns
        names = offered.keys() & source.parameters.keys()
        if any(p.kind is p.VAR_KEYWORD for p in source.parameters.values()):
            names |= offered.keys() - ON_REQUEST | self.columns.keys()
        if isinstance(source.function, functools.partial):
            names -= source.function.keywords.keys()  # bound already
        arguments = {name: offered[name] for name in names}
        if source.kind != "worker":  # which gets copies
            for name in names - UNCOPIED:
                arguments[name] = copy.deepcopy(arguments[name])
        return arguments


@dataclass
class CallResult:
    """The scores of a call on `count` completions, and the values that the function logged."""

    count: int
    scores: list[Any] = field(default_factory=list)  # from `read_scores`
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns for completions.jsonl
    metrics: dict[str, list[float]] = field(default_factory=dict)  # numbers for metrics.jsonl

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of values, one for each completion of the call (else ValueError)."""
        if column in OWN_COLUMNS or column.startswith("rewards/"):
            raise ValueError(f"log_extra: the run itself has a column {column!r}: rename it")
        values = list(_plain(values))
        if len(values) != self.count:
            got = f"{len(values)} values for {self.count} completions"
            raise ValueError(f"log_extra: column {column!r} has {got}")
        self.extra[column] = json.loads(json.dumps(values, default=_as_json))

    def log_metric(self, name: str, value: float) -> None:
        """Log a number, which is averaged over the calls and processes of a step."""
        self.metrics.setdefault(str(name), []).append(float(value))


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return show(value)


def call(function: Any, arguments: Mapping[str, Any], answer: CallResult) -> CallResult:
    """Call a plain function; if it returns an awaitable, wait for that.

    CallFailed if it raised, or did not return one score per completion.
    """
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = begin(lambda: returned).result()
        return replace(answer, scores=read_scores(returned, answer.count))
    except CallFailed:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(error, arguments) from error


def _failed(error: BaseException, arguments: Mapping[str, Any]) -> CallFailed:
    """Describe an error of a function, which may have taken chats for text."""
    hint = ""
    chats = [x for x in arguments.get("completions", ()) if isinstance(x, list)]
    if chats and isinstance(error, AttributeError | TypeError):
        hint = "; completions are chats here, lists of messages: read completion[0]['content']"
    return CallFailed(f"raised {tell(error)}{hint}{frames(error)}")


async def call_async(
    function: Any,
    arguments: Mapping[str, Any],
    answer: CallResult,
    timeout: float | None,
) -> CallResult:
    """Call an async function like `call`; after `timeout` seconds it is cancelled (CallFailed)."""
    try:
        async with asyncio.timeout(timeout) as limit:
            returned = await function(**arguments)
        return replace(answer, scores=read_scores(returned, answer.count))
    except CallFailed:
        raise
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        if limit.expired():
            raise CallFailed.late(timeout) from error
        raise _failed(error, arguments) from error


def read_scores(returned: Any, count: int) -> list[Any]:
    """Convert `count` scores to plain numbers, None, and lists of these (else CallFailed)."""
    scores = _plain(returned)
    if not isinstance(scores, list) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, list) else show(returned)
        raise CallFailed(f"must return a list of {count} scores, one per completion, got {got}")
    read = list[Any]()
    for i, score in enumerate(scores):
        label = f"completion {i}"
        steps = _plain(score)
        if not isinstance(steps, list):
            read.append(_number(score, label))
            continue
        numbers = []
        for t, step in enumerate(steps):
            numbers.append(_number(step, f"token {t} of {label}"))
        read.append(numbers)
    return read


def _number(score: Any, where: str) -> float | None:
    if score is None:
        return None
    if (number := finite(score)) is not None:
        return number
    raise CallFailed(
        f"returned {show(score)} for {where} of the call: return a finite number, or None where "
        "the reward does not apply"
    )


def _plain(values: Any) -> Any:
    """Return an array, a tensor or another sequence as a list; anything else unchanged."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return list(values) if is_sequence else values
