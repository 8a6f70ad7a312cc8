"""Calls of users' code: it may raise, return nonsense, call `sys.exit` or hang."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from rlhf_pg.boundary.quoted import told

T = TypeVar("T")

PATIENCE = 1.0  # seconds that an async call may take beyond its own timeout to be cancelled


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all async rewards, environments and tools of the process.

    A client or a semaphore that they share is bound to the loop of its first use.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def begin(call: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Call an async function on the event loop of the process."""

    async def outcome() -> Any:
        with foreign("an async function"):
            return await call()

    return asyncio.run_coroutine_threadsafe(outcome(), event_loop())


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Wait for an awaitable's result, even inside a running event loop (a notebook)."""
    return result_of(begin(lambda: awaitable))


def result_of(future: Future[T]) -> T:
    """Wait for a future's result; an interrupt is raised at once and cancels the future."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@contextmanager
def foreign(who: str) -> Iterator[None]:
    """Run users' code inside, and keep it from ending the process.

    Raises:
        RuntimeError: it called `sys.exit`.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{who} raised {told(error)}, which would end the run") from error


def finite(value: Any) -> float | None:
    """Return a value as a finite float; None if it is not a number or not finite."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of a tensor
        return None
    return number if math.isfinite(number) else None
