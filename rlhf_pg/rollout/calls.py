"""Calls that take their time, made beside the sampling."""

import asyncio
import concurrent.futures
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

Task = tuple[Future[Any], Callable[[], Any]]

PATIENCE = 1.0  # seconds after which an event loop that does not answer is given up


class Calls:
    """Each call has its own thread or, of an `async` function, a place on the event loop of the
    process, so that none waits for another; and a time limit.

    A plain function that is late cannot be stopped: its thread is left behind, and does not keep
    the process from ending.

    Args:
        timeout: seconds for each; None where the functions keep to a time of their own.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._deadlines: dict[Future[Any], float] = {}  # the earliest first
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in range(self._threads):
            self._tasks.put(None)
        for future in self._deadlines:
            future.cancel()

    @property
    def pending(self) -> int:
        """How many are not over, or have not been returned by `ended`."""
        return len(self._deadlines)

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call a function, plain or async; the future gets what it returns or raises."""
        call = partial(function, *arguments, **keywords)
        if inspect.iscoroutinefunction(function):
            future = asyncio.run_coroutine_threadsafe(_outcome(call), _event_loop())
        else:
            future = Future()
            self._tasks.put((future, call))
            if not self._idle.acquire(blocking=False):
                self._threads += 1
                threading.Thread(target=self._work, daemon=True).start()
        self._deadlines[future] = time.monotonic() + self.timeout
        return future

    def ended(self, wait: bool) -> list[Future[Any]]:
        """The calls that are over since the last time; those that are late are cancelled.

        Args:
            wait: until there is one; otherwise there may be none.
        """
        if wait and self._deadlines:
            left = max(0.0, next(iter(self._deadlines.values())) - time.monotonic())
            concurrent.futures.wait(
                self._deadlines, min(left, threading.TIMEOUT_MAX), FIRST_COMPLETED
            )
        now = time.monotonic()
        for future, deadline in self._deadlines.items():
            if deadline > now:
                break
            future.cancel()
        ended = [future for future in self._deadlines if future.done()]
        for future in ended:
            del self._deadlines[future]
        return ended

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            settle: Callable[[Any], None] = future.set_result
            try:
                outcome = call()
                if inspect.isawaitable(outcome):
                    outcome = _awaited(outcome)
            except BaseException as error:  # whatever it is, it is not for this thread
                settle, outcome = future.set_exception, error
            with suppress(InvalidStateError):  # it was late
                settle(outcome)
            self._idle.release()


def _awaited(awaitable: Awaitable[Any]) -> Any:
    outcome = _outcome(lambda: awaitable)
    return asyncio.run_coroutine_threadsafe(outcome, _event_loop()).result()


async def _outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except (KeyboardInterrupt, SystemExit) as error:  # which end a loop, and all that is on it
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls: a client or a semaphore that they share is bound to the loop of its first
    use. Another one follows where a call that does not await anything holds it up.
    """
    with _starting:
        if not _loops or not _answers(_loops[-1]):
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[-1].run_forever, daemon=True).start()
        return _loops[-1]


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(PATIENCE)
