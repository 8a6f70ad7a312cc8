"""The directory of a run: private, proved to be writable, of one run at a time; what that leaves in
it, and where it goes when another run begins there.
"""

import functools
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from filelock import FileLock, Timeout

from rlhf_pg.failpoints import failpoint
from rlhf_pg.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")

LOCK = "lock"
HOLDER = "host "  # what a lock begins with that a run has left
PROBE = 1 << 16  # bytes: more than a file system may find in a block that is half full

logger = logging.getLogger(__name__)

# In the order in which they are set aside: metrics.jsonl, by which a run is known, comes last.
RUN_FILES = (
    *("config.yaml", "completions.jsonl", "checkpoints", "best", "final", "reward.png"),
    *("tensorboard", "wandb", "run-id", "skipped", "metrics.json", "metrics.jsonl"),
)

SET_ASIDE = "{} held an earlier run or a model: it is in {} now"


def check_regular(directory: Path) -> None:
    """Refuse what has the name of a run's file and is a pipe or a device: reading it might never
    end.

    Raises:
        ValueError: there is one.
    """
    for path in (directory / name for name in RUN_FILES):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is no regular file: move it away, and resume again")


@contextmanager
def begun(directory: Path) -> Iterator[None]:
    """Around a training by one process: the directory is its alone, and what was there, set aside.

    Raises:
        ValueError: see `locked`.
    """
    with locked(directory):
        earlier = set_aside(directory)
        if earlier is not None:
            print(SET_ASIDE.format(directory, earlier), flush=True)
        yield


def set_aside(directory: Path) -> Path | None:
    """Move what has the name of a run's file, whoever wrote it, to `earlier-N/` beside it: nothing
    is lost.

    Returns:
        Where it is now; None if there was none.
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
    """Make the directory of a run, for its owner alone; one that is there stays as it is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, in a file that says who holds it.

    The lock is the system's, so it ends with the process, however that ends.

    Raises:
        ValueError: another run has the directory, or it cannot be written to.
    """
    file = directory / LOCK
    lock = FileLock(file)
    try:
        make_directory(directory)
        _probe(directory)
        file.open("a").close()
    except OSError as error:
        raise ValueError(
            f"output_dir {directory} cannot be written to: {error}. Make room, or choose another"
        ) from error
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"output_dir {directory} is in use by another run ({_holder(file)}): wait for it, end "
            "it, or choose another"
        ) from error
    except OSError as error:  # some network file systems know no locks
        logger.warning("%s cannot be locked (%s): let no other run use it", directory, error)
    try:
        holder = _holder(file)
        if not holder.startswith(HOLDER) and holder:
            raise ValueError(
                f"{file} is no lock of a run (it begins with {holder[: len(HOLDER)]!r}): move it "
                "away, or choose another output_dir"
            )
        file.write_text(f"{HOLDER}{socket.gethostname()}, pid {os.getpid()}\n")
        yield
    finally:
        lock.release()


def _holder(file: Path) -> str:
    return file.read_text(errors="replace").strip() if file.exists() else ""


def _probe(directory: Path) -> None:
    """Write as a run will, and remove it."""
    failpoint("probe")
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file:
        file.write(bytes(PROBE))
        file.flush()
        os.fsync(file.fileno())


def locks_run_dir(method: Callable[P, R]) -> Callable[P, R]:
    """For a method of an object with `args.output_dir` and a `runtime`: see `run_dir_lock`."""

    @functools.wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with run_dir_lock(Path(owner.args.output_dir), owner.runtime):
            return method(*args, **kwargs)

    return alone


@contextmanager
def run_dir_lock(directory: Path, runtime: Runtime) -> Iterator[None]:
    """Around a run: no other one can begin in the directory, which is made if it is not there.

    Raises:
        ValueError: on all processes: another run has the directory, or it cannot be written to.
    """
    failure: Exception | None = None
    with ExitStack() as held:
        try:
            if runtime.is_main:
                held.enter_context(locked(directory))
        except (OSError, ValueError) as error:
            failure = error
        reason = runtime.first_error(str(failure) if failure else None)
        if reason is not None:
            raise ValueError(reason) from failure
        yield
