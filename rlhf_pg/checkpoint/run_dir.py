"""The directory of a run: private, writable, and used by one run at a time.

What an earlier run left in it is set aside when another run begins there.
"""

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

from rlhf_pg.failpoints import failpoint
from rlhf_pg.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")


LOCK = "lock"
HOLDER = "host "  # beginning of a lock that a run has written
PROBE = 1 << 16  # bytes: more than a half-full block of a full file system has left

logger = logging.getLogger(__name__)

# In the order in which they are set aside: metrics.jsonl, which identifies a run, comes last.
RUN_FILES = (
    *("config.yaml", "completions.jsonl", "checkpoints", "best", "final", "reward.png"),
    *("tensorboard", "wandb", "run-id", "skipped", "metrics.json", "metrics.jsonl"),
)
SET_ASIDE = "{} held an earlier run or a model: it is in {} now"


def check_regular(directory: Path) -> None:
    """Refuse a pipe or a device with the name of a run's file: reading it might never end.

    Raises:
        ValueError: there is one.
    """
    for path in (directory / name for name in RUN_FILES):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is no regular file: move it away, and resume again")


@contextmanager
def begun(directory: Path) -> Iterator[None]:
    """Train inside, by one process: the directory is locked, and earlier contents are set aside.

    Raises:
        ValueError: `locked` refuses the directory.
    """
    with locked(directory):
        earlier = set_aside(directory)
        if earlier is not None:
            print(SET_ASIDE.format(directory, earlier), flush=True)
        yield


def set_aside(directory: Path) -> Path | None:
    """Move all files with names of a run's files to `earlier-N/`, so that nothing is lost.

    Returns:
        The new place; None if there was nothing to move.
    """
    there = [name for name in RUN_FILES if os.path.lexists(directory / name)]
    if not there:
        return None
    numbers = [path.name.removeprefix("earlier-") for path in directory.glob("earlier-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    place = directory / f"earlier-{last + 1}"
    place.mkdir()
    for name in there:
        (directory / name).rename(place / name)
    return place


def make_directory(directory: Path) -> None:
    """Make the directory of a run, for its owner alone; an existing one stays as it is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def locked(directory: Path) -> TextIO:
    """Lock the directory of a run; return the file, which says who holds the lock until it is
    closed.

    The lock is the system's (flock), so it ends when the process does, for whatever reason.

    Raises:
        ValueError: another run has the directory, or it cannot be written to.
    """
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
    """Write a file as a run will, and remove it."""
    failpoint("probe")
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file:
        file.write(bytes(PROBE))
        file.flush()
        os.fsync(file.fileno())


def locks_run_dir(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method in `run_dir_lock`; its object has `args.output_dir` and a `runtime`."""

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with run_dir_lock(Path(owner.args.output_dir), owner.runtime):
            return method(*args, **kwargs)

    return alone


@contextmanager
def run_dir_lock(directory: Path, runtime: Runtime) -> Iterator[None]:
    """Keep other runs out of a directory, which is made if it does not exist.

    Raises:
        ValueError: on all processes: another run has the directory, or it cannot be written to.
    """
    failure: Exception | None = None
    lock = None
    try:
        lock = locked(directory) if runtime.is_main else None
    except (OSError, ValueError) as error:
        failure = error
    try:
        reason = runtime.first_error(str(failure) if failure else None)
        if reason is not None:
            raise ValueError(reason) from failure
        yield
    finally:
        if lock is not None:
            lock.close()
