"""Writing of files by several processes together, any of which may fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_pg.runtime.processes import Runtime


class Writing:
    """A sequence of steps that write to `path`.

    A process whose step fails skips its further steps, but still takes part in every collective
    between them, since the others would wait for it. At `check` all processes learn of the failure.
    """

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self.runtime, self.path = runtime, path
        self._failure: Exception | None = None

    def do(self, step: Callable[[], Any]) -> None:
        """Take a step on this process."""
        if self._failure is None:
            try:
                step()
            except Exception as error:  # OSError, or the own classes of safetensors and tokenizers
                self._failure = error

    def main(self, step: Callable[[], Any]) -> None:
        """Take a step on the main process only."""
        if self.runtime.is_main:
            self.do(step)

    def check(self, undo: Callable[[], Any] = lambda: None) -> None:
        """Raise on all processes if a step has failed on any; collective.

        Args:
            undo: called by the main process before it raises.

        Raises:
            OSError: a step has failed; the message is that of the first process with a failure.
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
