"""The directory of a run: private, proved to be writable, and of one run at a time."""

import fcntl
import functools
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

from rlhf_pg.faults import failpoint
from rlhf_pg.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")

LOCK = "lock"
HOLDER = "host "  # what a lock begins with that a run has left
PROBE = 1 << 16  # bytes: more than a file system may find in a block that is half full

logger = logging.getLogger(__name__)


def occupying(method: Callable[P, R]) -> Callable[P, R]:
    """For a method of an object with `args.output_dir` and a `runtime`: see `occupied`."""

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with occupied(Path(owner.args.output_dir), owner.runtime):
            return method(*args, **kwargs)

    return alone


@contextmanager
def occupied(directory: Path, runtime: Runtime) -> Iterator[None]:
    """Around a run: no other one can begin in the directory, which is made if it is not there.

    The lock is the system's (flock), so it ends with the main process, however that ends.

    Raises:
        ValueError: on all processes: another run has the directory, or it cannot be written to.
    """
    failure: Exception | None = None
    lock = None
    try:
        lock = _locked(directory) if runtime.is_main else None
    except (OSError, ValueError) as error:
        failure = error
    try:
        reason = runtime.agreed(str(failure) if failure else None)
        if reason is not None:
            raise ValueError(reason) from failure
        yield
    finally:
        if lock is not None:
            lock.close()


def make_directory(directory: Path) -> None:
    """Make the directory of a run, for its owner alone; one that is there stays as it is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _locked(directory: Path) -> TextIO:
    """The file whose lock is held until it is closed; it says who holds it."""
    try:
        make_directory(directory)
        _probe(directory)
        lock = (directory / LOCK).open("a+", errors="replace")
    except OSError as error:
        raise ValueError(
            f"output_dir {directory} cannot be written to: {error}. Make room, or choose another"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ValueError(
            f"output_dir {directory} is in use by another run ({holder}): wait for it, end it, or "
            "choose another"
        ) from error
    except OSError as error:  # some network file systems know no locks
        logger.warning("%s cannot be locked (%s): let no other run use it", directory, error)
    lock.seek(0)
    if (first := lock.read(len(HOLDER))) not in ("", HOLDER):
        lock.close()
        raise ValueError(
            f"{directory / LOCK} is no lock of a run (it begins with {first!r}): move it away, or "
            "choose another output_dir"
        )
    lock.truncate(0)
    lock.write(f"{HOLDER}{socket.gethostname()}, pid {os.getpid()}\n")
    lock.flush()
    os.register_at_fork(after_in_child=lock.close)  # a fork would hold the lock, and outlive us
    return lock


def _probe(directory: Path) -> None:
    """Write as a run will, and remove it."""
    failpoint("probe")
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file:
        file.write(bytes(PROBE))
        file.flush()
        os.fsync(file.fileno())
