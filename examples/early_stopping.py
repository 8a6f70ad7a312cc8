"""GRPO that stops once the held-out reward has not risen for a while: a callback.

    python examples/early_stopping.py --task arithmetic --max_completion_length 6 --eval_steps 10

`best/` holds the model with the highest held-out reward, and `final/` the last one.
"""

import math
from typing import Any

from rlhf_pg import Callback, GRPOConfig, GRPOTrainer
from rlhf_pg.config import parse

PATIENCE = 3  # evaluations without a new highest reward


class EarlyStopping(Callback):
    """Ends a run after `patience` evaluations that do not raise `eval_reward` by `least`."""

    def __init__(self, patience: int = PATIENCE, least: float = 0.0) -> None:
        self.patience, self.least = patience, least
        self.highest, self.waited = -math.inf, 0

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Count evaluations since the highest reward."""
        if metrics["eval_reward"] > self.highest + self.least:
            self.highest, self.waited = metrics["eval_reward"], 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            trainer.stop()


if __name__ == "__main__":
    GRPOTrainer(args=parse(GRPOConfig), callbacks=[EarlyStopping()]).train()
