"""Comparison of the paper model with the published throughputs of published.yaml.

The constants that are neither from a data sheet nor assumed are fitted to them: EFFICIENCY and
TRAFFIC to the rows of `train`, HOST to those of `decode`. The other rows fit nothing.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from rlhf_pg.plan.decoding import HOST, VLLM, rollout_seconds
from rlhf_pg.plan.devices import DEVICES, Device
from rlhf_pg.plan.job import Job
from rlhf_pg.plan.learning import (
    EFFICIENCY,
    EXPOSED,
    TRAFFIC,
    body_seconds,
    gather_seconds,
    head_seconds,
)
from rlhf_pg.plan.paper import VERL, learner_seconds, stages
from rlhf_pg.plan.shapes import Shape
from rlhf_pg.plan.sharding import SHARDINGS


def gated(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    inner: int,
    vocabulary: int,
    tied: bool = False,
    width: int = 128,
) -> Shape:
    """Return the shape of a Llama or Qwen, whose MLP has three matrices; norms and biases do not
    count.

    Args:
        heads: numbers of query heads, and of key-value heads.
        width: width of a head.
    """
    attention, keys = (n * width for n in heads)
    body = layers * hidden * (2 * attention + 2 * keys + 3 * inner)
    return Shape(layers, hidden, attention, keys, inner, vocabulary, float(body), tied)


# As the configs of the Hub have them.
SHAPES = {
    "Qwen2.5-0.5B": gated(24, 896, (14, 2), 4864, 151_936, tied=True, width=64),
    "Qwen3-0.6B": gated(28, 1024, (16, 8), 3072, 151_936, tied=True),
    "Qwen2.5-1.5B": gated(28, 1536, (12, 2), 8960, 151_936, tied=True),
    "Qwen3-4B": gated(36, 2560, (32, 8), 9728, 151_936, tied=True),
    "Qwen2.5-7B": gated(28, 3584, (28, 4), 18944, 152_064),
    "Llama-3-8B": gated(32, 4096, (32, 8), 14336, 128_256),
    "Llama-2-13B": gated(40, 5120, (40, 40), 13824, 32_000),
    "Qwen2.5-14B": gated(48, 5120, (40, 8), 13824, 152_064),
    "Qwen2.5-32B": gated(64, 5120, (40, 8), 27648, 152_064),
    "Qwen3-32B": gated(64, 5120, (64, 8), 25600, 151_936),
    "Llama-3-70B": gated(80, 8192, (64, 8), 28672, 128_256),
    "Qwen2.5-72B": gated(80, 8192, (64, 8), 29568, 152_064),
}


def long_tailed(count: int, mean: float, longest: int) -> tuple[int, ...]:
    """Return quantiles of an exponential distribution as lengths, cut at `longest`."""
    shares = ((i + 0.5) / count for i in range(count))
    return tuple(min(longest, math.ceil(-mean * math.log(1 - share))) for share in shares)


class Fitted(NamedTuple):
    """The constants that are fitted to published numbers."""

    efficiency: float = EFFICIENCY
    traffic: float = TRAFFIC
    host: float = HOST


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published number, in the unit of its kind, and the set-up it was measured in."""

    kind: str
    what: str
    source: str
    published: float
    device: str
    model: str
    bandwidth: float | None = None
    setup: dict[str, Any] = field(default_factory=dict)

    def predicted(self, fitted: Fitted | None = None) -> float:
        """Return the number that the formula of its kind predicts."""
        gpu = DEVICES[self.device]
        gpu = gpu._replace(bandwidth=self.bandwidth or gpu.bandwidth)
        return KINDS[self.kind](gpu, SHAPES[self.model], self.setup, fitted or Fitted())

    def off(self, fitted: Fitted | None = None) -> float:
        """Return the larger of published and predicted, divided by the smaller."""
        return math.exp(abs(math.log(self.predicted(fitted) / self.published)))


def _decode(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    """Predict the milliseconds per token after the first; GPUs that share a model have a row
    each.
    """
    gpus, width = setup.get("gpus", 1), setup["width"]
    rows = max(1, setup["rows"] // gpus)
    seconds = [
        rollout_seconds(VLLM, gpu, shape, _requested(setup, rows, n), gpus, fitted.host)
        for n in (width, 1)
    ]
    return float(1e3 * (seconds[0] - seconds[1]) / (width - 1))


def _requests(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    """Predict the requests per second."""
    rows: int = setup["rows"]
    job = _requested(setup, rows, setup["width"])
    return float(rows / rollout_seconds(VLLM, gpu, shape, job, 1, fitted.host))


def _requested(setup: dict[str, Any], rows: int, width: int) -> Job:
    return Job(prompt=setup["prompt"], lengths=(width,) * rows, generations=1)


def _train(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    """Predict the tokens per second on each GPU: forward, backward and gathering."""
    tokens: int = setup["tokens"]
    passes, pairs = 3 + setup["recomputed"], tokens * setup["length"] / 2
    body = body_seconds(gpu, shape, tokens, pairs, passes, fitted.efficiency, fitted.traffic)
    piece = tokens * shape.vocabulary
    head = head_seconds(gpu, shape, tokens, piece, 3, efficiency=fitted.efficiency)
    sent = gather_seconds(gpu, shape, setup["gpus"], 3)
    return float(tokens / (body + head + max(EXPOSED * sent, sent - body - head)))


def _score(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    return learner_seconds(VERL, gpu, shape, _job(setup))[0]


def _update(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    return sum(learner_seconds(VERL, gpu, shape, _job(setup))[1:])


def _step(gpu: Device, shape: Shape, setup: dict[str, Any], fitted: Fitted) -> float:
    """Predict the seconds of a step without padding, recomputing only if the set-up says so."""
    return stages(replace(VERL, recomputes=False), gpu, shape, _job(setup))["total"]


def _job(setup: dict[str, Any]) -> Job:
    rest = dict(setup)
    lengths = long_tailed(rest.pop("rows"), rest.pop("mean"), rest.pop("longest"))
    layout = {each.name: each for each in SHARDINGS}[rest.pop("layout")]
    return Job(lengths=lengths, layout=layout, processes=rest.pop("gpus"), **rest)


KINDS: dict[str, Callable[[Device, Shape, dict[str, Any], Fitted], float]] = {
    "decode": _decode,
    "requests": _requests,
    "train": _train,
    "learn": _train,
    "score": _score,
    "update": _update,
    "step": _step,
}
UNITS = {
    "decode": "ms a token",
    "requests": "requests/s",
    "train": "tokens/s per GPU",
    "learn": "tokens/s per GPU",
    "score": "s",
    "update": "s",
    "step": "s",
}


@cache
def points() -> tuple[Point, ...]:
    """Return the points of published.yaml, in its order."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return tuple(Point(kind=kind, **row) for kind, rows in found.items() for row in rows)


class Agreement(NamedTuple):
    """The factors by which the model is off on so many points."""

    points: int
    median: float
    worst: float


def _agreement(off: Iterable[float]) -> Agreement:
    found = list(off)
    return Agreement(len(found), median(found), max(found))


@cache
def agreement() -> Agreement:
    """Return the agreement of the model with its present constants."""
    return _agreement(point.off() for point in points())


# What is tried for each constant. No product is taken to reach more than 0.8 of a peak.
GRIDS = {
    "train": [Fitted(e / 100, float(t)) for e, t in product(range(40, 81, 2), range(0, 81, 2))],
    "decode": [Fitted(host=h * 1e-4) for h in range(51)],
}


@cache
def _losses(kind: str) -> list[list[float]]:
    """Return the squared log of each point's factor, for every candidate."""
    chosen = [point for point in points() if point.kind == kind]
    return [[math.log(p.off(tried)) ** 2 for p in chosen] for tried in GRIDS[kind]]


def fit(kind: str, without: int | None = None) -> Fitted:
    """Return the candidate with the least error on the points of a kind, less one if given."""
    losses = [sum(row) - (row[without] if without is not None else 0) for row in _losses(kind)]
    return GRIDS[kind][losses.index(min(losses))]


def left_out(kind: str) -> Agreement:
    """Return the agreement when each point is predicted with constants fitted to the others."""
    chosen = [point for point in points() if point.kind == kind]
    return _agreement(point.off(fit(kind, i)) for i, point in enumerate(chosen))
