"""The rounding within which two runs are compared: none, or that of another layout of the sums."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_pg.report.run_files import RunFiles, Start

# Keys that change the order of sums and nothing else.
LAYOUT_KEYS = (
    *("micro_batch_tokens", "cpu_threads", "gradient_checkpointing", "rollout_cache_tokens"),
)
LAYOUT = ("processes", "backend", "device")  # attributes of `Start`
# Relative to the largest number of its kind in the step, and absolute. docs/reliability.md has what
# was measured. In float64 some layers of transformers still compute in float32.
BY_DTYPE = {"float64": (1e-6, 1e-9), "float32": (1e-3, 1e-6), "bfloat16": (5e-2, 1e-3)}
# Which tokens are sampled in one pass depends on when environments answer and on how fast drafts
# are, and with it the order of sums in the sampler: relative bound by dtype, for the same weights
# and ids.
TIMING = "which tokens are sampled together depends on drafts and on when episodes are answered"
SAMPLED_TOGETHER = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 5e-2}
COARSEST = ("bfloat16", "float32", "float64")
# Shares of tokens beyond a bound: rounding moves a whole token across it.
SHARES = ("clip_ratio/", "value_clip_ratio", "ratio_overflow")
SLACK_OF_SHARE = 0.01
# A step trains on weights that are apart by what the steps before have added up, and updates with
# large learning rates scale it up: PPO at 1e-3 by up to 25 in a step. What jumps by more, from
# rounding to something seen, is none.
GROWTH, MOST = 30.0, 0.1
# The least size of a log-probability, in nats: near 0 it is the difference of larger numbers.
NAT = 1.0
OF_NATS = ("logprobs", "sampler_logprob", "log_ratio", "kl", "entropy")


@dataclass(frozen=True)
class Rounding:
    """A bound on how far two numbers may be apart and still count as equal.

    Attributes:
        rtol: share of the largest number of its kind; 0 compares bit by bit.
        floor: absolute part.
        why: what makes rounding differ.
        grows: a step may be as far apart as the one before, and `GROWTH` times that.
        sampled: share by which what the sampler computed may be apart in any case.
    """

    rtol: float = 0.0
    floor: float = 0.0
    why: str = ""
    grows: bool = False
    sampled: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.rtol == 0 and self.floor == 0

    def after(self, apart: float) -> "Rounding":
        """Return the rounding of a step, from how far the step before was apart."""
        grown = min(GROWTH * apart, MOST)
        return replace(self, rtol=grown) if self.grows and grown > self.rtol else self

    def of_sampler(self) -> "Rounding":
        """Return the rounding of the log-probabilities with which tokens were sampled."""
        return replace(self, rtol=max(self.rtol, self.sampled))

    def same(self, a: Any, b: Any, scale: float = 0.0) -> bool:
        """Return whether two values count as equal.

        Args:
            scale: size of the largest number of this kind.
        """
        if not (is_number(a) and is_number(b)):
            return bool(a == b)
        if a == b or (math.isnan(a) and math.isnan(b)):
            return True
        largest = max(abs(a), abs(b), scale)
        return not self.is_exact and bool(abs(a - b) <= self.rtol * largest + self.floor)

    def same_metric(self, name: str, a: Any, b: Any, size: float = 0.0) -> bool:
        """Return whether two values of a metric count as equal.

        Args:
            size: what the metric usually has.
        """
        if self.is_exact or not name.startswith(SHARES):
            return self.same(a, b, size)
        return Rounding(self.rtol, max(self.floor, SLACK_OF_SHARE)).same(a, b)

    def __str__(self) -> str:
        if self.is_exact:
            return f"compared bit by bit{self._but()}"
        bound = f"{self.rtol:g} of the largest number of its kind, or {self.floor:g}"
        if self.grows:
            bound += f"; or {GROWTH:g} times what the step before was apart, up to {MOST:g}"
        return f"compared within rounding ({bound}): {self.why}"

    def _but(self) -> str:
        if not self.sampled:
            return ""
        bound = f"the log-probabilities of sampled tokens within {self.sampled:g} of the largest"
        return f", but {bound}: {TIMING}"


def rounding_of(a: RunFiles, b: RunFiles, rtol: float | None = None) -> Rounding:
    """Choose the rounding: none where both runs add up their sums in the same order.

    Args:
        rtol: a rounding to use whatever the runs say; 0 is none.
    """
    reasons = layout_differences(a, b)
    known = [str(run.config.get("dtype", "float32")) for run in (a, b)]
    dtype = next((name for name in COARSEST if name in known), "float32")
    default, floor = BY_DTYPE[dtype]
    if rtol is not None:
        stated = "; ".join(["as asked for", *reasons])
        return Rounding(rtol, floor * rtol / default, stated) if rtol else Rounding()
    timed = (_has_episodes(a) and _has_episodes(b)) or _has_drafts(a) or _has_drafts(b)
    sampled = SAMPLED_TOGETHER[dtype] if timed else 0.0
    if sampled and any(_trains_on_sampler(run) for run in (a, b)):
        reasons.append(f"{TIMING}, and updates use what the sampler computed")
    why = f"{'; '.join(reasons)}; {dtype}"
    return Rounding(default, floor, why, grows=True) if reasons else Rounding(sampled=sampled)


def _has_episodes(run: RunFiles) -> bool:
    return any(name.startswith("episodes/") for line in run.metrics[:1] for name in line)


def _has_drafts(run: RunFiles) -> bool:
    on_cpu = all(start.device.startswith("cpu") for start in run.starts)
    return run.config.get("rollout_drafts") == "auto" and on_cpu and not _trains_on_sampler(run)


def _trains_on_sampler(run: RunFiles) -> bool:
    """Return whether updates depend on the log-probabilities with which tokens were sampled."""
    corrected = run.config.get("sampler_correction", "none") not in ("none", "auto")
    return corrected or run.config.get("old_logprobs_source") == "sampler"


def layout_differences(a: RunFiles, b: RunFiles) -> list[str]:
    """Return what changes the order of sums between two runs, in words."""
    said = [
        f"{key} {a.config[key]} and {b.config[key]}"
        for key in LAYOUT_KEYS
        if key in a.config and key in b.config and a.config[key] != b.config[key]
    ]
    layouts = [[_layout(start) for start in run.starts] for run in (a, b)]
    if all(layouts) and set(layouts[0]) != set(layouts[1]):
        said += [
            f"{name} {_joined(layouts[0], k)} and {_joined(layouts[1], k)}"
            for k, name in enumerate(LAYOUT)
            if {one[k] for one in layouts[0]} != {one[k] for one in layouts[1]}
        ]
    return said


def largest(*columns: Sequence[Any] | Mapping[Any, Any] | None) -> float:
    """Return the size of the largest finite number of some columns; 0 if there is none."""
    numbers = (abs(x) for column in columns for x in column or () if is_number(x))
    return max((x for x in numbers if math.isfinite(x)), default=0.0)


def distance(first: Sequence[Any] | None, second: Sequence[Any] | None) -> float:
    """Return how far two columns are apart, as a share of their largest number."""
    pairs = zip(first or (), second or (), strict=False)
    apart = largest([x - y for x, y in pairs if is_number(x) and is_number(y)])
    return apart / size if (size := largest(first, second)) else 0.0


def least_size(name: str) -> float:
    """Return the least size by which rounding of a quantity is judged."""
    return NAT if name in OF_NATS else 0.0


def is_number(x: Any) -> bool:
    """Return whether a value is a number that can be apart from another.

    A damaged file may have an integer that no float can hold, which is compared like a text.
    """
    if isinstance(x, float):
        return True
    return isinstance(x, int) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _layout(start: Start) -> tuple[str, ...]:
    return tuple(str(getattr(start, name)) for name in LAYOUT)


def _joined(layouts: Iterable[tuple[str, ...]], k: int) -> str:
    return " then ".join(dict.fromkeys(one[k] for one in layouts))
