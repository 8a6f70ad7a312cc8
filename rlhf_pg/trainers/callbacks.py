"""Where a user's code may look into a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer


class Callback:
    """Override what is needed. Every process calls it, at the same moments."""

    def on_step(self, trainer: PolicyGradientTrainer, metrics: dict[str, Any]) -> None:
        """After each step; `metrics` is the line of metrics.jsonl, and may be added to."""

    def on_save(self, trainer: PolicyGradientTrainer, path: Path) -> None:
        """After a checkpoint has been written."""

    def on_end(self, trainer: PolicyGradientTrainer) -> None:
        """After the last step, when `final/` has been written."""
