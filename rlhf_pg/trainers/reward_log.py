"""The log of reward functions: the numbers that they log, and how many of their calls failed."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.rewards.scoring import Judgement
from rlhf_pg.rollout import Episode
from rlhf_pg.runtime import Runtime

logger = logging.getLogger(__name__)

TAKEN = "log_metric: the run itself has a metric {}: rename it"


class RewardLog:
    """A collector of what was logged and what failed, from one batch or evaluation.

    Args:
        names: names of the reward functions.
        tolerant: failures of functions do not end the run by themselves.
        has_episodes: there is an environment, or there are tools.
    """

    def __init__(self, names: Sequence[str], tolerant: bool, has_episodes: bool) -> None:
        self.names, self.tolerant, self.has_episodes = list(names), tolerant, has_episodes
        self.clear()

    def clear(self) -> None:
        """Forget all of it."""
        self._logged: dict[str, list[float]] = {}
        self._asked = dict.fromkeys([*self.names, ""], 0)  # "" for the episodes
        self._failed = dict.fromkeys([*self.names, ""], 0)
        self._first: dict[str, str] = {}  # failure of functions ("calls") and of episodes

    def add(self, judgement: Judgement, episodes: Sequence[Episode]) -> None:
        """Take in what the rewards have said of some completions.

        Raises:
            ValueError: a function logs a number that the run itself has.
        """
        for name, numbers in judgement.metrics.items():
            if name in KEYS or name.startswith("eval_"):  # before the batch is trained on
                raise ValueError(TAKEN.format(shown(name)))
            self._logged.setdefault(name, []).extend(numbers)
        for name, count in judgement.failed.items():
            self._asked[name] += judgement.called
            self._failed[name] += count
        if judgement.first_failure is not None:
            self._first.setdefault("calls", judgement.first_failure)
        errors = [episode.error for episode in episodes if episode.error is not None]
        self._asked[""] += len(episodes)
        self._failed[""] += len(errors)
        if errors:
            self._first.setdefault("episodes", errors[0])

    def settle(
        self, runtime: Runtime, evaluates: bool = False
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the run's metrics and what functions logged, over all processes, and forget them.

        Collective. `rewards/{name}/failed` is the share of completions on which a function has
        failed.

        Raises:
            ValueError: on all processes, every call has failed, or every episode. In an evaluation
                failed episodes are wrong answers.
        """
        logged = _means(self._logged, runtime)
        metrics = self._settle_calls(runtime) if self.tolerant else {}
        if self.has_episodes and not evaluates:
            asked, failed = self._totals([""], runtime)
            if failed and failed == asked:
                self._stop("every episode", "episodes", runtime)
        self.clear()
        return metrics, logged

    def _settle_calls(self, runtime: Runtime) -> dict[str, float]:
        metrics = {}
        for name in self.names:
            asked, failed = self._totals([name], runtime)
            metrics[f"rewards/{name}/failed"] = failed / asked if asked else 0.0
        asked, failed = self._totals(self.names, runtime)
        if failed and failed == asked:
            self._stop("every call of a reward function", "calls", runtime)
        if "calls" in self._first:
            logger.warning("a reward function failed: %s", self._first["calls"])
        return metrics

    def _totals(self, names: Sequence[str], runtime: Runtime) -> tuple[int, int]:
        counts = [sum(table[name] for name in names) for table in (self._asked, self._failed)]
        asked, failed = runtime.all_reduce_sum(torch.tensor(counts, device=runtime.device)).tolist()
        return asked, failed

    def _stop(self, what: str, kind: str, runtime: Runtime) -> None:
        with runtime.raise_together(ValueError):
            first = self._first.get(kind)
            if first is not None:
                raise ValueError(f"{what} of the batch failed, the first: {first}")


def with_logged(metrics: dict[str, Any], logged: dict[str, float]) -> dict[str, Any]:
    """Return the run's own metrics together with those that reward functions logged.

    Raises:
        ValueError: a function logged a name that the run itself has.
    """
    for name in logged:
        if name in metrics:
            raise ValueError(TAKEN.format(shown(name)))
    return metrics | logged


def _means(logged: dict[str, list[float]], runtime: Runtime) -> dict[str, float]:
    """Average the numbers of all processes, which may have logged under different names."""
    own = {name: [sum(numbers), len(numbers)] for name, numbers in logged.items()}
    totals: dict[str, list[float]] = {}
    for text in runtime.gather_text(json.dumps(own)):
        for name, (total, count) in json.loads(text).items():
            pair = totals.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    return {name: total / count for name, (total, count) in sorted(totals.items())}
