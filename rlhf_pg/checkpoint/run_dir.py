"""The directory of a run: private, writable, and used by one run at a time."""

import logging
import os
import shutil
import socket
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_pg.boundary.output_files import open_own
from rlhf_pg.failpoints import failpoint
from rlhf_pg.runtime import Runtime

LOCK = "lock"
EARLIER = "earlier-*"  # directories of runs that were set aside

logger = logging.getLogger(__name__)

MODELS = ("checkpoints", "best", "final")
# In the order of setting aside: metrics.jsonl, which identifies a run, comes last.
RUN_FILES = (
    "config.yaml",
    "completions.jsonl",
    "checkpoints",
    "best",
    "final",
    "tensorboard",
    "wandb",
    "run-id",
    "skipped",
    "report.html",
    "tokens",
    "trace.jsonl",
    "metrics.json",
    "metrics.jsonl",
)


def set_aside(directory: Path) -> str | None:
    """Move the files of an earlier run to `earlier-N/`; return a message, or None without files."""
    names = [name for name in RUN_FILES if os.path.lexists(directory / name)]
    if not names:
        return None
    numbers = [path.name.removeprefix("earlier-") for path in directory.glob(EARLIER)]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    folder = directory / f"earlier-{last + 1}"
    folder.mkdir()
    for name in names:
        (directory / name).rename(folder / name)
    return f"{directory} had an earlier run or a model, which was moved to {folder}"


@contextmanager
def run_dir_lock(directory: Path, runtime: Runtime) -> Iterator[None]:
    """Make the directory of a run, and hold its lock; the system releases it with the process.

    A run that ends without a step leaves nothing: earlier runs that it set aside are put back.
    ValueError on all processes if another run uses the directory, or it cannot be written to.
    """
    lock = FileLock(directory / LOCK, fallback_to_soft=False)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    before = {path.name for path in directory.glob("*")}
    try:
        with runtime.raise_together(ValueError):
            if runtime.is_main:
                _acquire(lock, directory)
        yield
    except BaseException:
        if lock.is_locked and not _has_results(directory):
            with suppress(OSError):
                _undo(directory, before, made)
        raise
    finally:
        lock.release()


def _has_results(directory: Path) -> bool:
    """Return whether there is a step or a model; a full disk may have lost the lines of steps."""
    metrics = directory / "metrics.jsonl"
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    return has_steps or any((directory / name).exists() for name in MODELS)


def _undo(directory: Path, before: Container[str], made: Sequence[Path]) -> None:
    """Remove what a run has written to a directory that had the names `before`, put back what it
    moved, and remove the directories that it made.
    """
    moved = [folder for folder in directory.glob(EARLIER) if folder.name not in before]
    returning = [path for folder in moved for path in folder.iterdir()]
    for name in RUN_FILES:
        path = directory / name
        if name in before and name not in {path.name for path in returning}:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in returning:
        path.rename(directory / path.name)
    for folder in moved:
        folder.rmdir()
    if made:
        (directory / LOCK).unlink()
    for path in made:
        path.rmdir()


def _acquire(lock: FileLock, directory: Path) -> None:
    file = directory / LOCK
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        failpoint("lock")
        open(file, "a", opener=open_own).close()
    except OSError as error:
        raise ValueError(
            f"output_dir {directory} cannot be written to: {error}. Make room, or choose another"
        ) from error
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        holder = file.read_text(errors="replace").strip()
        raise ValueError(
            f"output_dir {directory} is in use by another run ({holder}): end it, or choose another"
        ) from error
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s): do not use it for other runs", directory, error)
    with open(file, "w", opener=open_own) as stream:
        stream.write(f"host {socket.gethostname()}, pid {os.getpid()}\n")
