"""Code of users, which may do anything: one event loop for all of it, and its errors in words."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

PATIENCE = 1.0  # seconds after which an event loop that does not answer is given up
MOST_LATE = 64  # threads that hang in calls which nobody waits for any more

_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all async rewards, environments and tools of the process: a client or a semaphore
    that they share is bound to the loop of its first use.

    Another one follows where a call that does not await anything holds it up.

    Raises:
        RuntimeError: too many are held up.
    """
    with _starting:
        if not _loops or not _answers(_loops[-1], PATIENCE):
            _loops.append(_another_loop())
        return _loops[-1]


def _another_loop() -> asyncio.AbstractEventLoop:
    """One that goes on after it was held up, or a new one."""
    for loop in _loops[:-1]:
        if _answers(loop, PATIENCE / 100):
            _loops.remove(loop)
            return loop
    check_late(len(_loops))
    new = asyncio.new_event_loop()
    threading.Thread(target=new.run_forever, daemon=True).start()
    return new


def check_late(count: int) -> None:
    """Make sure that another thread may be left behind.

    Raises:
        RuntimeError: so many hang already.
    """
    if count >= MOST_LATE:
        raise RuntimeError(
            f"{count} earlier calls have not returned, long after their time: let them keep to a "
            "time of their own, or be async and await"
        )


def begin(call: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Call an async function on the event loop of the process."""
    return asyncio.run_coroutine_threadsafe(_outcome(call), event_loop())


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """What it returns, also where an event loop is running already (a notebook).

    An interrupt is raised at once, and cancels it.
    """
    future = begin(lambda: awaitable)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """What it returns; an attempt to end the process is an error, and does not end the loop."""
    try:
        return await call()
    except (KeyboardInterrupt, SystemExit) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _answers(loop: asyncio.AbstractEventLoop, patience: float) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(patience)
