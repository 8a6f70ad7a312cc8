"""Metrics of a step: summed locally, and reduced over processes once."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf_pg.advantages import group_stats, total_scores
from rlhf_pg.data import Batch
from rlhf_pg.rewards.scores import sum_step_scores

# Keys of every line of metrics.jsonl; null if a number was not computed.
KEYS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "reward",
    "reward_std",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "clip_ratio/region_mean",
    "frac_reward_zero_std",
    "num_tokens",
    "step_time",
    "time/rollout",
    "time/reward",
    "time/score",
    "time/update",
    "perf/tokens_per_second",
)

Metrics = dict[str, float]


class Meter:
    """Collects means, as sums and counts that add up over micro-batches and processes, and extremes
    for names that end in /min or /max.
    """

    def __init__(self) -> None:
        self._sums = defaultdict[str, list[Tensor]](list)
        self._highest = defaultdict[str, list[Tensor]](list)  # for /min: of the negated values
        self.seconds: dict[str, float] = {}
        self._made = time.perf_counter()

    @property
    def age(self) -> float:
        """The seconds since the meter was made."""
        return time.perf_counter() - self._made

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add to the sum and the count of a mean."""
        total = total.detach().to(torch.float64)
        if not isinstance(count, Tensor):
            # Filling in a number avoids the synchronisation of copying it to a GPU.
            count = torch.full_like(total, count)
        self._sums[name].append(torch.stack([total, count.to(total)]))

    def add_masked(self, name: str, x: Tensor, mask: Tensor) -> None:
        """Add the True slots of a (B,T) tensor; or numbers of rows, (B,), that have such slots."""
        x = x.detach()
        if x.ndim == 1:
            mask = mask.any(1)
        if not name.endswith(("/min", "/max")):
            self.add(name, torch.where(mask, x, 0.0).sum(), mask.sum())
            return
        if name.endswith("/min"):
            x = -x
        highest = torch.where(mask, x.to(torch.float64), -math.inf).amax()
        self._highest[name].append(highest)

    def absorb(self, other: "Meter") -> None:
        """Add everything in another meter."""
        for name, parts in other._sums.items():
            self._sums[name].extend(parts)
        for name, parts in other._highest.items():
            self._highest[name].extend(parts)

    def sums(self) -> Tensor:
        """Return (names, 2) sums and counts in the order of the names, equal on all processes."""
        sums = [torch.stack(self._sums[name]).sum(0) for name in sorted(self._sums)]
        return torch.stack(sums) if sums else torch.zeros(0, 2)

    def means(self, sums: Tensor) -> Metrics:
        """Return the means, from `sums` reduced over processes."""
        means = {}
        for name, (total, count) in zip(sorted(self._sums), sums.tolist(), strict=True):
            means[name] = math.nan
            if count:
                means[name] = total / count
        return means

    def extremes(self, gather: Callable[[Tensor], Tensor]) -> Metrics:
        """Return extremes over the rows that `gather` returns; NaN if there was no slot."""
        if not self._highest:
            return {}
        names = sorted(self._highest)
        local = torch.stack([torch.stack(self._highest[name]).amax() for name in names])
        highest = gather(local[None]).amax(0)
        extremes = {}
        for name, x in zip(names, highest.tolist(), strict=True):
            if name.endswith("/min"):
                x = -x
            extremes[name] = x if math.isfinite(x) else math.nan
        return extremes

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Measure the wall-clock seconds of a phase, under `time/{phase}`."""
        start = time.perf_counter()
        yield
        key = f"time/{phase}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start


def step_metrics(
    batch: Batch,
    names: Sequence[str],
    gather: Callable[[Tensor], Tensor],
) -> Metrics:
    """Compute the metrics of scores and lengths of a step whose credit is known. `names` are those
    of the sources; `gather` returns the rows of all processes; collective.
    """
    raw = gather(sum_step_scores(batch.scores))
    trained = gather(batch.totals)[:, :-1]
    metrics = reward_metrics(raw, trained, names, gather(batch.groups))
    return metrics | length_metrics(gather(batch.lengths()))


def reward_metrics(
    raw: Tensor,
    trained: Tensor,
    names: Sequence[str],
    groups: Tensor,
) -> Metrics:
    """Compute the reward metrics over all ranks, from the totals of completions.

    Args:
        raw: (N,K) raw scores, one column per source; NaN where one does not apply.
        trained: (N,K) weighted training rewards.
        groups: (N,). If no two rows share a group, `reward_std` is over all rows, and there is no
            `frac_reward_zero_std`.
    """
    means = trained.nanmean(0)
    metrics = {"reward": math.nan}
    if not means.isnan().all():
        metrics["reward"] = means.nansum().item()
    for name, column in zip(names, raw.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = column.nanmean().item()
        # Over all completions of all prompts; a single one has no std.
        valid = column[~column.isnan()]
        metrics[f"rewards/{name}/std"] = math.nan
        if len(valid) > 1:
            metrics[f"rewards/{name}/std"] = valid.std().item()
    is_grouped = len(torch.unique(groups)) < len(groups)
    if not is_grouped:
        groups = torch.zeros_like(groups)
    groups = groups.cpu()
    total = total_scores(trained.cpu(), groups)
    valid = ~total.isnan()
    stats = group_stats(total, valid, groups)
    metrics["reward_std"] = stats.std[valid].mean().item()
    if is_grouped:
        metrics["frac_reward_zero_std"] = stats.constant.double().mean().item()
    return metrics


def length_metrics(lengths: Tensor) -> Metrics:
    """Compute the length metrics over all ranks, from the rows of `Batch.lengths`, (N,3)."""
    completion, _, truncated = lengths.double().unbind(1)
    return {
        "completions/mean_length": completion.mean().item(),
        "completions/min_length": completion.min().item(),
        "completions/max_length": completion.max().item(),
        "completions/clipped_ratio": truncated.mean().item(),
    }
