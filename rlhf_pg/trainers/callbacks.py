"""Callbacks, which observe a run."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlhf_pg.boundary.quoted import quoted, shown


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


def checked(callbacks: Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list.

    Raises:
        ValueError: one is a class, of transformers or no callback.
    """
    for callback in callbacks or ():
        if inspect.isclass(callback):
            name = quoted(callback.__name__)
            raise ValueError(f"callbacks must be objects, got the class {name}: write {name}()")
        if isinstance(callback, TrainerCallback):
            raise ValueError(
                f"callbacks must derive from rlhf_pg.Callback, got {shown(callback)} of "
                "transformers: write its on_step_end as on_step(trainer, metrics), its on_evaluate "
                "as on_evaluate(trainer, metrics), and trainer.stop() for should_training_stop"
            )
        if not isinstance(callback, Callback):
            raise ValueError(
                f"callbacks must be objects of rlhf_pg.Callback, got {shown(callback)}"
            )
    return list(callbacks or ())
