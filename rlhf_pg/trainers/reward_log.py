"""The log of reward functions: the numbers that they log, and how many of their calls failed."""

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
        self._judged: list[Judgement] = []
        self._errors: list[str | None] = []  # of each episode

    def add(self, judgement: Judgement, episodes: Sequence[Episode]) -> None:
        """Take in what the rewards have said of some completions.

        Raises:
            ValueError: a function logs a number that the run itself has.
        """
        for name in judgement.metrics:
            if name in KEYS or name.startswith("eval_"):  # before the batch is trained on
                raise ValueError(TAKEN.format(shown(name)))
        self._judged.append(judgement)
        self._errors += [episode.error for episode in episodes]

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
        judged, errors = self._judged, self._errors
        self.clear()
        own: dict[str, list[float]] = {}
        for name, numbers in (pair for one in judged for pair in one.metrics.items()):
            own[name] = [*own.get(name, ()), *numbers]
        totals: dict[str, list[float]] = {}  # sum and count; processes may log other names
        for sums in runtime.gather_objects({k: [sum(x), len(x)] for k, x in own.items()}):
            for name, pair in sums.items():
                totals[name] = [a + b for a, b in zip(totals.get(name, (0, 0)), pair, strict=True)]
        logged = {name: total / count for name, (total, count) in sorted(totals.items())}
        if not (self.tolerant or self.has_episodes):  # as on all processes
            return {}, logged

        # Completions that each function was asked of, and those on which it failed; then episodes.
        asked = sum(one.called for one in judged)
        pairs = [[asked, sum(one.failed[name] for one in judged)] for name in self.names]
        pairs.append([len(errors), len(errors) - errors.count(None)])
        counts = runtime.all_reduce_sum(torch.tensor(pairs, device=runtime.device))
        *calls, episodes = counts.tolist()
        metrics, ends = dict[str, float](), list[tuple[str, list[int], str | None]]()
        if self.tolerant:
            for name, (called, failed) in zip(self.names, calls, strict=True):
                metrics[f"rewards/{name}/failed"] = failed / max(called, 1)
            first = next((one.first_failure for one in judged if one.first_failure), None)
            ends.append(("call of a reward function", counts[:-1].sum(0).tolist(), first))
            if first:
                logger.warning("a reward function failed: %s", first)
        if self.has_episodes and not evaluates:
            ends.append(("episode", episodes, next((one for one in errors if one), None)))
        for what, (count, failed), first in ends:
            if failed and failed == count:
                with runtime.raise_together(ValueError):
                    if first:
                        raise ValueError(f"every {what} of the batch failed, the first: {first}")
        return metrics, logged


def with_logged(metrics: dict[str, Any], logged: dict[str, float]) -> dict[str, Any]:
    """Return the run's own metrics together with those that reward functions logged.

    Raises:
        ValueError: a function logged a name that the run itself has.
    """
    for name in logged:
        if name in metrics:
            raise ValueError(TAKEN.format(shown(name)))
    return metrics | logged
