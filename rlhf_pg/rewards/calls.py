"""Calls of one reward function: on copies, in the trainer, on its event loop or in a worker.

A call is of some completions, the rows, and may fail.
"""

import asyncio
import concurrent.futures
import copy
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from transformers import TrainerState

from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_code import PATIENCE, begin, foreign, wait_for
from rlhf_pg.boundary.worker import Log
from rlhf_pg.rewards import answers
from rlhf_pg.rewards.answers import Answer, CallFailed, answered
from rlhf_pg.rewards.sources import LOGS, Source
from rlhf_pg.rewards.workers import Worker, WorkerPool

THEMSELVES = {"environments"}  # which may not be copied


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Some rows as reward functions are shown them; every list has an entry per row.

    Attributes:
        inputs: prompts, completions and completion_ids.
        columns: the dataset's other columns.
        facts: known of each row, for functions that ask: ended, truncated, environments.
        progress: known of the run, for functions that ask: step, trainer_state.
    """

    inputs: dict[str, list[Any]]
    columns: dict[str, list[Any]]
    facts: dict[str, list[Any]]
    progress: dict[str, Any]

    def __len__(self) -> int:
        return len(self.inputs["completions"])

    def select(self, rows: Sequence[int]) -> "Shown":
        """Return what may be told of some of the rows."""
        picked = (self.inputs, self.columns, self.facts)
        inputs, columns, facts = (
            {name: [column[i] for i in rows] for name, column in lists.items()} for lists in picked
        )
        return dataclasses.replace(self, inputs=inputs, columns=columns, facts=facts)

    def arguments(self, source: Source) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a function takes: what it gets a copy of, and the environments themselves."""
        given = {
            name: column
            for name, column in (self.inputs | self.columns).items()
            if source.takes(name)
        }
        given |= {
            name: fact
            for name, fact in (self.facts | self.progress).items()
            if source.wants(name, self.columns)
        }
        themselves = {
            name: given.pop(name) for name in THEMSELVES & given.keys() & self.facts.keys()
        }
        return given, themselves

    def logs(self, source: Source) -> list[str]:
        """Return the names of the log functions that a function takes."""
        return [name for name in LOGS if source.wants(name, self.columns)]


class Pending(Protocol):
    """A call that has begun."""

    def result(self) -> Answer:
        """Wait for its answer; the rows for which it failed have a `Failed`."""
        ...

    def cancel(self) -> Any:
        """Give it up."""
        ...


# ----------------------------------------------------------------------------- one call, somewhere


def call_here(source: Source, shown: Shown) -> Answer:
    """Call a function in this process, on copies, and wait if it returns an awaitable.

    Each function gets a copy, so that its changes reach neither the others nor the trainer.

    Raises:
        CallFailed: it raised, or returned what cannot be read or has another length.
    """
    log = Log(len(shown))
    try:
        with foreign(source.who):
            result = source.function(**_copied(source, shown, log))
            result = wait_for(result) if inspect.isawaitable(result) else result
    except Exception as error:
        raise CallFailed(f"raised {told(error)}") from error
    return _answer(source, result, log)


def call_worker(worker: Worker, number: int, source: Source, shown: Shown) -> Answer:
    """Call a function in a worker process, where it has this number.

    A `TrainerState` arrives as a plain object with its fields, since its class takes seconds to
    import.

    Raises:
        CallFailed: it failed, ended the process or took too long, or its answer has another length.
    """
    given, _ = shown.arguments(source)
    for name, value in given.items():
        if isinstance(value, TrainerState):
            given[name] = SimpleNamespace(**vars(value))
    reply = worker.call(number, given, shown.logs(source), len(shown))
    scores = reply.get("scores", answers.Unread(str(reply.get("got"))))
    if isinstance(scores, list):
        scores = [_received(score) for score in scores]
    return Answer(
        _checked(source, scores, len(shown)), reply.get("extra", {}), reply.get("metrics", {})
    )


def _received(score: Any) -> Any:
    if isinstance(score, list):
        return [_received(step) for step in score]
    return answers.Unread(str(score.get("shown"))) if isinstance(score, dict) else score


class AsyncCall:
    """A call of an async function on the event loop of the process, which has begun.

    Args:
        timeout: seconds; None for any time. A call that is late is cancelled where it awaits.
    """

    def __init__(self, source: Source, shown: Shown, timeout: float | None) -> None:
        self.source, self.shown, self.timeout = source, shown, timeout
        self._future, self._log = self._begun(shown)

    def result(self) -> Answer:
        """Wait for the answer."""
        return answered(self._waited, len(self.shown))

    def cancel(self) -> None:
        """Give the call up."""
        self._future.cancel()

    def _waited(self) -> Answer:
        try:
            # The time of a loop that a call holds up is not over until somebody looks.
            late = None if self.timeout is None else self.timeout + PATIENCE
            if not concurrent.futures.wait([self._future], late).done:
                raise CallFailed(_late(self.timeout))
            said = self._future.result()
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(f"raised {told(error)}") from error
        finally:
            self._future.cancel()
        return _answer(self.source, said, self._log)

    def _begun(self, shown: Shown) -> tuple[Future[Any], Log]:
        log = Log(len(shown))
        try:
            arguments = _copied(self.source, shown, log)
            return begin(lambda: self._timed(arguments)), log
        except Exception as error:  # a column that cannot be copied
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed, log

    async def _timed(self, arguments: dict[str, Any]) -> Any:
        function: Callable[..., Awaitable[Any]] = self.source.function  # type: ignore[assignment]
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await function(**arguments)
        except TimeoutError as error:
            if limit.expired():
                raise CallFailed(_late(self.timeout)) from error
            raise


def begin_in_worker(pool: WorkerPool, number: int, source: Source, shown: Shown) -> Future[Answer]:
    """Begin a call in the next worker that is free."""
    return pool.submit(
        lambda worker: answered(lambda: call_worker(worker, number, source, shown), len(shown))
    )


def _copied(source: Source, shown: Shown, log: Log) -> dict[str, Any]:
    given, themselves = shown.arguments(source)
    logs = {name: getattr(log, name) for name in shown.logs(source)}
    copied: dict[str, Any] = copy.deepcopy(given)
    return copied | themselves | logs


def _answer(source: Source, said: Any, log: Log) -> Answer:
    try:
        scores = answers.read(said)
    except Exception as error:  # a tensor without values, for example
        raise CallFailed(f"returned what cannot be read: {told(error)}") from error
    return Answer(_checked(source, scores, log.count), log.extra, log.metrics)


def _checked(source: Source, scores: Any, count: int) -> list[Any]:
    try:
        return answers.checked(source.name, scores, count)
    except ValueError as error:
        raise CallFailed(str(error).removeprefix(f"{source.who} ")) from error


def _late(timeout: float | None) -> str:
    return f"did not return within {timeout:g} s (reward_timeout)"
