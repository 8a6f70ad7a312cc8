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
        # Completions that each function was asked of, and those on which it failed; then episodes.
        self._counts = torch.zeros(len(self.names) + 1, 2, dtype=torch.int64)
        self._first_call = self._first_episode = ""  # what failed first

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
            self._counts[self.names.index(name)] += torch.tensor([judgement.called, count])
        errors = [episode.error for episode in episodes if episode.error is not None]
        self._counts[-1] += torch.tensor([len(episodes), len(errors)])
        self._first_call = self._first_call or judgement.first_failure or ""
        self._first_episode = self._first_episode or "".join(errors[:1])

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
        if not (self.tolerant or self.has_episodes):  # as on all processes
            self.clear()
            return {}, logged
        counts = runtime.all_reduce_sum(self._counts.to(runtime.device))
        *calls, episodes = counts.tolist()
        all_calls = counts[:-1].sum(0).tolist()
        metrics, ends = dict[str, float](), list[tuple[str, list[int], str]]()
        if self.tolerant:
            for name, (asked, failed) in zip(self.names, calls, strict=True):
                metrics[f"rewards/{name}/failed"] = failed / max(asked, 1)
            ends.append(("call of a reward function", all_calls, self._first_call))
            if self._first_call:
                logger.warning("a reward function failed: %s", self._first_call)
        if self.has_episodes and not evaluates:
            ends.append(("episode", episodes, self._first_episode))
        for what, (asked, failed), first in ends:
            if failed and failed == asked:
                with runtime.raise_together(ValueError):
                    if first:
                        raise ValueError(f"every {what} of the batch failed, the first: {first}")
        self.clear()
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
