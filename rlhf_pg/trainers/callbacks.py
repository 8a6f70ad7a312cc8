"""Callbacks, which observe a run."""

from pathlib import Path
from typing import Any


class Callback:
    """User code that observes a run; every process calls it, at the same moments.

    Override what is needed. `trainer.stop()` ends the run after the step.
    """

    def on_start(self, trainer: Any) -> None:
        """Called before the first step, also of a resumed run."""

    def on_step_begin(self, trainer: Any) -> None:
        """Called before each step."""

    def on_step_end(self, trainer: Any) -> None:
        """Called when a step is taken, before anything is evaluated."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after an evaluation that is part of the run; `metrics` are those of the step."""

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after each step; `metrics` is the line of metrics.jsonl, and may be added to."""

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called when trackers get the line of a step."""

    def on_save(self, trainer: Any, path: Path) -> None:
        """Called after a checkpoint has been written."""

    def on_end(self, trainer: Any) -> None:
        """Called after the last step, when `final/` has been written."""
