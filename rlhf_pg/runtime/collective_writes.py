"""Files that several processes write together, each its own, and any of which may fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_pg.runtime.processes import Runtime


class Writing:
    """One thing that is written to `path`, in steps.

    A process whose step fails leaves out its further ones, but comes along to every collective
    between them, where others would wait for it. `check` is where all learn of it.
    """

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self.runtime, self.path = runtime, path
        self._failure: Exception | None = None

    def do(self, step: Callable[[], Any]) -> None:
        """Take a step on this process."""
        if self._failure is None:
            try:
                step()
            except Exception as error:  # of the disk; safetensors and tokenizers have their own
                self._failure = error

    def main(self, step: Callable[[], Any]) -> None:
        """Take a step, on the main process alone."""
        if self.runtime.is_main:
            self.do(step)

    def check(self, undo: Callable[[], Any] = lambda: None) -> None:
        """Go on if no step has failed on any process; collective.

        Args:
            undo: done by the main process first, if one has.

        Raises:
            OSError: on all processes, with what failed on the first of those where something did.
        """
        error = self._failure
        reason = self.runtime.first_error(f"{type(error).__name__}: {error}" if error else None)
        if reason is None:
            return
        if self.runtime.is_main:
            undo()
        raise OSError(
            f"{self.path} could not be saved ({reason}). Checkpoints that were saved before are "
            "whole: make sure that the disk has room and can be written to by every process, then "
            "go on with --resume_from_checkpoint latest"
        ) from error
