"""The directory of a run of several processes, of one run at a time."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rlhf_pg.run_files import locked
from rlhf_pg.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")


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
        reason = runtime.agreed(str(failure) if failure else None)
        if reason is not None:
            raise ValueError(reason) from failure
        yield
    finally:
        if lock is not None:
            lock.close()
