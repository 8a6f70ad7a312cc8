"""Slow calls of user code that run concurrently with sampling."""

import concurrent.futures
import inspect
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Self

from rlhf_pg.boundary.user_code import begin

MOST_LATE = 64  # threads in calls that were given up

_late: set[threading.Thread] = set()


class ConcurrentCalls:
    """Calls with a time limit, none of which waits for another.

    Each plain function has its own thread, each `async` function a place on the event loop of the
    process. A late async function is cancelled where it awaits. The thread of a late plain function
    is left behind, up to a small number of such threads, and does not keep the process from ending.

    Args:
        timeout: seconds for each call; None if the functions limit their own time.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._deadlines: dict[Future[Any], float] = {}  # the earliest first
        self._threads: dict[Future[Any], threading.Thread] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._deadlines:
            self._give_up(future)

    @property
    def pending(self) -> int:
        """The number of calls that are not over, or have not been returned by `ended`."""
        return len(self._deadlines)

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call a function, plain or async, and return a future of its result."""
        call = partial(function, *arguments, **keywords)
        if inspect.iscoroutinefunction(function):
            future = begin(call)
        else:
            future = Future()
            self._threads[future] = self._start_thread(future, call)
        self._deadlines[future] = time.monotonic() + self.timeout
        return future

    def ended(self, wait: bool) -> list[Future[Any]]:
        """Return the calls that are over since the last time; cancel those that are late.

        Args:
            wait: wait until there is at least one.
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
            self._give_up(future)
        ended = [future for future in self._deadlines if future.done()]
        for future in ended:
            del self._deadlines[future]
            self._threads.pop(future, None)
        return ended

    def _give_up(self, future: Future[Any]) -> None:
        if future.cancel() and future in self._threads:
            _late.add(self._threads[future])

    def _start_thread(self, future: Future[Any], call: Callable[[], Any]) -> threading.Thread:
        _late.intersection_update([thread for thread in _late if thread.is_alive()])
        thread = threading.Thread(target=_settle, args=(future, call), daemon=True)
        if len(_late) < MOST_LATE:
            thread.start()
        else:
            future.set_exception(
                RuntimeError(
                    f"{MOST_LATE} earlier calls have not returned, long after their time: give "
                    "them a timeout of their own, or make them async and let them await"
                )
            )
        return thread


def call_within(
    timeout: float | None, function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    """Call a function, plain or async, and return its result.

    Raises:
        TimeoutError: it took longer than `timeout` seconds.
        BaseException: what it raised.
    """
    with ConcurrentCalls(timeout) as calls:
        future = calls.start(function, *arguments, **keywords)
        while calls.pending:
            calls.ended(wait=True)
    if future.cancelled():
        raise TimeoutError(f"no answer within {calls.timeout:g} s")
    return future.result()


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    settle: Callable[[Any], None] = future.set_result
    try:
        outcome = call()
        if inspect.isawaitable(outcome):
            awaited = begin(lambda: outcome)
            future.add_done_callback(lambda _: awaited.cancel())
            outcome = awaited.result()
    except BaseException as error:  # any error belongs to the caller, not to this thread
        settle, outcome = future.set_exception, error
    with suppress(InvalidStateError):  # it was late
        settle(outcome)
