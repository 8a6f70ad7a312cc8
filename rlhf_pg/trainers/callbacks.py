"""Callbacks, which observe a run."""

from pathlib import Path
from typing import Any


class Callback:
    """User code that observes a run; every process calls it, at the same moments.

    Override what is needed. `trainer.stop()` ends the run after the step.
    """

    def on_start(self, trainer: Any) -> None:
        """Called before the first step, also when the run was resumed."""

    def on_step_begin(self, trainer: Any) -> None:
        """Called before each step."""

    def on_step_end(self, trainer: Any) -> None:
        """Called after each step, before an evaluation."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after an evaluation in the run; entries may be added to `metrics`."""

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after each step and its evaluation; entries may be added to `metrics`."""

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after a step's metrics were sent to the trackers."""

    def on_save(self, trainer: Any, path: Path) -> None:
        """Called after a checkpoint has been written."""

    def on_end(self, trainer: Any) -> None:
        """Called after the last step, when `final/` has been written."""
