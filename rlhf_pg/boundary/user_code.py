"""Calls of users' code: it may raise, return nonsense, call `sys.exit` or hang."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from rlhf_pg.boundary.quoted import told

PATIENCE = 1.0  # seconds that an async call may take beyond its own timeout to be cancelled


@cache
def event_loop(name: str = "users") -> asyncio.AbstractEventLoop:
    """Return a loop of the process; by default that of all async rewards, environments and tools.

    A client or a semaphore that they share is bound to the loop of its first use.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def begin(call: Callable[[], Awaitable[Any]], loop: str = "users") -> Future[Any]:
    """Call an async function on an event loop of the process."""

    async def outcome() -> Any:
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
            raise RuntimeError(f"an async function raised {told(error)}") from error

    return asyncio.run_coroutine_threadsafe(outcome(), event_loop(loop))


def call_beside(
    timeout: float | None, function: Callable[..., Any], /, *arguments: Any, **keywords: Any
) -> Future[Any]:
    """Call a function, plain or async, concurrently with all others.

    A plain one has its own thread, which is left behind if it is late, and does not keep the
    process from ending. What can be awaited is cancelled if it is late. The future raises
    TimeoutError after `timeout` seconds, and RuntimeError for what would end the run.
    """
    future: Future[Any] = Future()

    def settle(call: Callable[[], Any]) -> None:
        with suppress(InvalidStateError):  # it was late
            try:
                result = call()
                if inspect.isawaitable(result):
                    begun = begin(lambda: result)
                    begun.add_done_callback(lambda done: settle(done.result))
                    future.add_done_callback(lambda _: begun.cancel())
                else:
                    future.set_result(result)
            except BaseException as error:  # any error belongs to the caller, not to this thread
                if not isinstance(error, Exception) or isinstance(error, StopIteration):
                    error = RuntimeError(f"a function raised {told(error)}")
                future.set_exception(error)

    async def expire(timeout: float) -> None:
        await asyncio.sleep(timeout)
        with suppress(InvalidStateError):
            future.set_exception(TimeoutError(f"no answer within {timeout:g} s"))

    if timeout is not None:  # on a loop of its own, since a function may block that of users
        timer = asyncio.run_coroutine_threadsafe(expire(timeout), event_loop("clock"))
        future.add_done_callback(lambda _: timer.cancel())
    call = partial(settle, partial(function, *arguments, **keywords))
    if inspect.iscoroutinefunction(function):
        call()
    else:
        threading.Thread(target=call, daemon=True).start()
    return future


@contextmanager
def foreign(who: str) -> Iterator[None]:
    """Run users' code inside; RuntimeError if it calls `sys.exit`."""
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
