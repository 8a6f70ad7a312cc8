"""Slow calls of user code that run concurrently with sampling."""

import concurrent.futures
import ctypes
import inspect
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from rlhf_pg.boundary.user_code import begin, check_late, end_fork

Task = tuple[Future[Any], Callable[[], Any]]

_late: set[threading.Thread] = set()  # threads still in a call that was given up


class Late(SystemExit):
    """The exception that is raised in a call that has run out of time."""


class ConcurrentCalls:
    """A pool of calls with a time limit, none of which waits for another.

    Each plain function has its own thread, each `async` function a place on the event loop of the
    process. A plain function that is late gets the exception `Late` at its next line. Code that
    waits outside of Python does not see it: its thread is left behind, up to a small number of such
    threads, and does not keep the process from ending.

    Args:
        timeout: seconds for each call; None if the functions limit their own time.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._deadlines: dict[Future[Any], float] = {}  # the earliest first
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._running: dict[Future[Any], threading.Thread] = {}
        self._switching = threading.Lock()  # held while a thread begins or ends a call
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
            self._give_up(future)

    @property
    def pending(self) -> int:
        """The number of calls that are not over, or have not been returned by `ended`."""
        return len(self._deadlines)

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call a function, plain or async, and return a future of its result."""
        call = partial(function, *arguments, **keywords)
        try:
            future = begin(call) if inspect.iscoroutinefunction(function) else self._queue(call)
        except RuntimeError as error:  # too many calls hang
            future = Future()
            future.set_exception(error)
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
        return ended

    def _give_up(self, future: Future[Any]) -> None:
        if not future.cancel():
            return
        with self._switching:
            thread = self._running.get(future)
            if thread is not None:  # it is still in the call
                _late.add(thread)
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Late))

    def _queue(self, call: Callable[[], Any]) -> Future[Any]:
        if not self._idle.acquire(blocking=False):
            check_late(len(_late))
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        future: Future[Any] = Future()
        self._tasks.put((future, call))
        return future

    def _work(self) -> None:
        thread = threading.current_thread()
        try:
            while (task := self._tasks.get()) is not None:
                future, call = task
                with self._switching:
                    self._running[future] = thread
                if not future.cancelled():
                    _settle(future, call)
                with self._switching:
                    del self._running[future]
                if thread in _late:  # the exception may still be on its way
                    return
                self._idle.release()
        except Late:  # it arrived after the call was over
            pass
        finally:
            _late.discard(thread)


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
    process = os.getpid()
    try:
        outcome = call()
        if inspect.isawaitable(outcome):
            awaited = begin(lambda: outcome)
            future.add_done_callback(lambda _: awaited.cancel())
            outcome = awaited.result()
    except BaseException as error:  # any error belongs to the caller, not to this thread
        settle, outcome = future.set_exception, error
    end_fork(process, "an environment or a tool")
    with suppress(InvalidStateError):  # it was late
        settle(outcome)
