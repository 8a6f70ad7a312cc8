"""Call users' code, which may raise, return nonsense, call `sys.exit` or hang."""

import asyncio
import inspect
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from rlhf_pg.boundary.quoted import tell

P = ParamSpec("P")
T = TypeVar("T")
# The largest magnitude of a number to compute with: sums of many of them fit into float32.
LARGEST = 1e30


class CallFailed(Exception):
    """A call failed; the message follows the name of the function ("raised KeyError")."""

    @classmethod
    def late(cls, timeout: float | None) -> "CallFailed":
        return cls(f"did not return within {timeout:g} s (reward_timeout)")


def once_per_process(make: Callable[P, T]) -> Callable[P, T]:
    """Cache what a function makes, but not in a fork, which has no thread of its parent's."""
    cached: Any = cache(make)
    os.register_at_fork(after_in_child=cached.cache_clear)
    once: Callable[P, T] = cached
    return once


@once_per_process
def event_loop(name: str = "users") -> asyncio.AbstractEventLoop:
    """Return a loop of the process; by default the one for async rewards, environments and tools.

    They share it, since a client or a semaphore is bound to the loop of its first use.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def on_this_gpu(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that computes on the GPU of this thread; a new thread would take the first
    one of the machine, which belongs to another process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return call
    device = torch.cuda.current_device()

    def moved() -> T:
        torch.cuda.set_device(device)
        return call()

    return moved


def begin(call: Callable[[], Awaitable[Any]], loop: str = "users") -> Future[Any]:
    """Call an async function on an event loop of the process."""
    call = on_this_gpu(call)

    async def outcome() -> Any:
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
            raise RuntimeError(f"an async function raised {tell(error)}") from error

    return asyncio.run_coroutine_threadsafe(outcome(), event_loop(loop))


def call_concurrently(
    timeout: float | None, function: Callable[..., Any], /, *arguments: Any, **keywords: Any
) -> Future[Any]:
    """Call a function, plain or async, concurrently with all others.

    A plain function has its own thread, which is abandoned on a timeout and does not keep the
    process alive; an awaitable is cancelled. The future raises TimeoutError after `timeout`
    seconds, and RuntimeError for an exception that would end the run.
    """
    call = on_this_gpu(partial(function, *arguments, **keywords))

    async def outcome() -> Any:
        try:
            async with asyncio.timeout(timeout) as limit:
                is_async = inspect.iscoroutinefunction(function)
                result = call() if is_async else await asyncio.wrap_future(_in_thread(call))
                if inspect.isawaitable(result):
                    result = await asyncio.wrap_future(begin(lambda: result))
                return result
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no answer within {timeout:g} s") from None
            raise

    return begin(outcome, loop="clock")  # users' functions may block their loop


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # timed out
            try:
                future.set_result(call())
            except BaseException as error:  # raised to the caller, not in this thread
                if not isinstance(error, Exception) or isinstance(error, StopIteration):
                    error = RuntimeError(f"a function raised {tell(error)}")
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def foreign(who: str) -> Iterator[None]:
    """Run users' code inside the block; RuntimeError if it calls `sys.exit`."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"{who} raised {tell(error)}, which would end the run") from error


def finite(value: Any) -> float | None:
    """Return a value as a finite float; None if it is not a number or not finite."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor
        return None
    return number if math.isfinite(number) else None
