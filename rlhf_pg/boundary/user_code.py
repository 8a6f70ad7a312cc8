"""Calls of users' code, which may do anything.

They share one event loop, changes that they make to the process are undone, and errors become text.
"""

import asyncio
import logging
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from rlhf_pg.boundary.quoted import told

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds after which an event loop that does not answer is given up
MOST_LATE = 64  # threads hanging in abandoned calls

_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all async rewards, environments and tools of the process: a client or a
    semaphore that they share is bound to the loop of its first use.

    Another loop takes over if a call that never awaits holds it up.

    Raises:
        RuntimeError: too many loops are held up.
    """
    with _starting:
        if not _loops or not _answers(_loops[-1], PATIENCE):
            _loops.append(_another_loop())
        return _loops[-1]


def _another_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that has recovered from being held up, or a new one."""
    for loop in _loops[:-1]:
        if _answers(loop, PATIENCE / 10):
            _loops.remove(loop)
            return loop
    check_late(len(_loops))
    new = asyncio.new_event_loop()
    threading.Thread(target=new.run_forever, daemon=True).start()
    return new


def check_late(count: int) -> None:
    """Refuse to leave another thread behind if too many hang.

    Raises:
        RuntimeError: `MOST_LATE` hang already.
    """
    if count >= MOST_LATE:
        raise RuntimeError(
            f"{count} earlier calls have not returned, long after their time: give them a timeout "
            "of their own, or make them async and let them await"
        )


def begin(call: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Call an async function on the event loop of the process.

    Raises:
        RuntimeError: see `event_loop`.
    """
    loop = event_loop()  # before there is a coroutine, which nobody would await if it raises
    return asyncio.run_coroutine_threadsafe(_outcome(call), loop)


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


async def _outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns; an attempt to end the process becomes an error."""
    process = os.getpid()
    try:
        return await call()
    except (KeyboardInterrupt, SystemExit) as error:
        raise RuntimeError(told(error)) from error
    finally:
        end_fork(process, "an async function")


def _answers(loop: asyncio.AbstractEventLoop, patience: float) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(patience)


# -------------------------------------------------------- effects of users' code on the process


class Settings(NamedTuple):
    """The settings of a process that its whole run depends on."""

    process: int
    directory: str | None  # None: it was removed
    dtype: torch.dtype
    device: torch.device
    gradients: bool
    threads: int

    @classmethod
    def now(cls) -> "Settings":
        directory = None
        with suppress(OSError):
            directory = os.getcwd()
        return cls(
            os.getpid(),
            directory,
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )

    def restore(self, who: str) -> None:
        """Restore what `who` has changed, with a warning. A fork of the process ends here."""
        end_fork(self.process, who)
        _reopen(who)
        now = self.now()
        if now == self:
            return
        if now.directory != self.directory and self.directory is not None:
            with suppress(OSError):  # it was removed, and output_dir is absolute
                os.chdir(self.directory)
        torch.set_default_dtype(self.dtype)
        if now.device != self.device:
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_grad_enabled(self.gradients)
        torch.set_num_threads(self.threads)
        changed = [name for name, value in now._asdict().items() if value != getattr(self, name)]
        _warn_once(
            f"{who} changed settings of the process: {', '.join(changed)}; they are put back"
        )


def _reopen(who: str) -> None:
    """Reopen standard output or error that was closed, or whatever prints would fail."""
    for name in ("stdout", "stderr"):
        if getattr(getattr(sys, name), "closed", False):
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            _warn_once(f"{who} closed {name}: what is written there from now on is lost")


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def end_fork(process: int, who: str) -> None:
    """End a process that is not `process`: a fork that returned would train beside it."""
    if os.getpid() != process:
        with suppress(AttributeError, ValueError, OSError):
            sys.stderr.write(f"{who} forked this process, which returned from it: it ends here\n")
            sys.stderr.flush()
        os._exit(1)


@contextmanager
def foreign(who: str) -> Iterator[None]:
    """Run users' code inside: undo what it changes of the process, and keep it from ending it.

    Raises:
        RuntimeError: it called `sys.exit`, or raised another BaseException.
    """
    before = Settings.now()
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{who} raised {told(error)}, which would end the run") from error
    finally:
        before.restore(who)


def finite(value: Any) -> float | None:
    """Return a value as a finite float; None if it is none."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # an object may raise anything
        return None
    return number if math.isfinite(number) else None


def plain_text(value: Any) -> str:
    """Return the `str` of a value, even if that raises."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose text raises {type(error).__name__}>"
