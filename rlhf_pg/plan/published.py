"""Throughputs that others have published, and how far the paper model is off on each.

Only those whose set-up is described well enough to be computed are here. The constants of the model
that are not taken from a data sheet or assumed are fitted to them: EFFICIENCY and TRAFFIC to the rows
of `train`, HOST to those of `decode`. The rows of `requests`, `stage` and `step` are fitted by nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from rlhf_pg.plan.decoding import HOST, VLLM, rollout_seconds
from rlhf_pg.plan.devices import DEVICES, Device
from rlhf_pg.plan.job import Job, long_tailed
from rlhf_pg.plan.learning import (
    EFFICIENCY,
    EXPOSED,
    TRAFFIC,
    body_seconds,
    gather_seconds,
    head_seconds,
)
from rlhf_pg.plan.paper import VERL, learner_seconds, stages
from rlhf_pg.plan.shapes import SHAPES
from rlhf_pg.runtime import LAYOUTS

_, ZERO1, ZERO2, _, FSDP2 = LAYOUTS
H100 = DEVICES["h100"]
# Meta's H100s have HBM2e; their lower power limit is not in the model.
H100_HBM2E = H100._replace(bandwidth=2.4e12, memory=96e9)
GH200 = H100._replace(bandwidth=4.0e12, memory=96e9)

TITAN_H100 = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
TITAN_A100 = (
    "https://github.com/pytorch/torchtitan/blob/"
    "041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
)
PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines"
NEMO = "https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html"
NEMO_04 = "https://github.com/NVIDIA-NeMo/RL/blob/r0.4.0/docs/about/performance-summary.md"
VERL_LOG = "https://github.com/verl-project/verl/issues/1208"


class Fitted(NamedTuple):
    """The constants that are fitted."""

    efficiency: float = EFFICIENCY
    traffic: float = TRAFFIC
    host: float = HOST


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published number.

    Args:
        what: what was run, in words.
        kind: which formula foretells it.
        published: in `unit`.
        setup: what the formula of its kind takes.
    """

    what: str
    source: str
    kind: str
    published: float
    unit: str
    device: Device
    model: str
    setup: dict[str, Any] = field(default_factory=dict)

    def predicted(self, fitted: Fitted) -> float:
        """In `unit`."""
        return KINDS[self.kind](self, fitted)

    def off(self, fitted: Fitted) -> float:
        """The larger of published and predicted, in units of the smaller."""
        return math.exp(abs(math.log(self.predicted(fitted) / self.published)))


def _decode(point: Point, fitted: Fitted) -> float:
    """Milliseconds of a position, on the average over the tokens of equal rows."""
    rows, prompt, width, gpus = (point.setup[key] for key in ("rows", "prompt", "width", "gpus"))
    job = Job(prompt=prompt, lengths=(width,) * (rows // gpus or 1), generations=1)
    alone = replace(job, lengths=(1,) * len(job.lengths))
    shape = SHAPES[point.model]
    whole, first = (
        rollout_seconds(VLLM, point.device, shape, j, gpus, fitted.host) for j in (job, alone)
    )
    return 1e3 * (whole - first) / (width - 1)


def _requests(point: Point, fitted: Fitted) -> float:
    """Requests per second of a server that has all of them from the beginning."""
    count, prompt, width = (point.setup[key] for key in ("count", "prompt", "width"))
    job = Job(prompt=prompt, lengths=(width,) * count, generations=1)
    seconds = rollout_seconds(VLLM, point.device, SHAPES[point.model], job, 1, fitted.host)
    return float(count / seconds)


def _train(point: Point, fitted: Fitted) -> float:
    """Tokens per second on each GPU: forward, backward, and what is gathered for them."""
    tokens, length, gpus = (point.setup[key] for key in ("tokens", "length", "gpus"))
    shape, device = SHAPES[point.model], point.device
    passes = 3 + point.setup["recomputed"]
    pairs = tokens * length / 2
    seconds = body_seconds(
        device, shape, tokens, pairs, passes, fitted.efficiency, fitted.traffic
    ) + head_seconds(
        device, shape, tokens, tokens * shape.vocabulary, 3, efficiency=fitted.efficiency
    )
    sent = gather_seconds(device, shape, gpus, 3)
    return float(tokens / (seconds + max(EXPOSED * sent, sent - seconds)))


def _stage(point: Point, fitted: Fitted) -> float:
    """Seconds of a learner's stage, as verl does it."""
    score, update, exchange = learner_seconds(
        VERL, point.device, SHAPES[point.model], point.setup["job"]
    )
    return score if point.setup["stage"] == "score" else update + exchange


def _step(point: Point, fitted: Fitted) -> float:
    """Seconds of a step without padding and without recomputing."""
    library = replace(VERL, recomputes=False)
    return stages(library, point.device, SHAPES[point.model], point.setup["job"])["total"]


KINDS: dict[str, Callable[[Point, Fitted], float]] = {
    "decode": _decode,
    "requests": _requests,
    "train": _train,
    "learn": _train,
    "stage": _stage,
    "step": _step,
}


def _decoding(
    what: str, source: str, published: float, device: Device, model: str, **setup: int
) -> Point:
    setup = {"rows": 1, "prompt": 128, "width": 128, "gpus": 1} | setup
    return Point(
        what=what,
        source=source,
        kind="decode",
        published=published,
        unit="ms a token",
        device=device,
        model=model,
        setup=setup,
    )


def _training(
    what: str,
    source: str,
    published: float,
    device: Device,
    model: str,
    kind: str = "train",
    **setup: float,
) -> Point:
    return Point(
        what=what,
        source=source,
        kind=kind,
        published=published,
        unit="tokens/s per GPU",
        device=device,
        model=model,
        setup=setup,
    )


# 1024 prompts with 5 completions on four GPUs: 547,190 tokens on each, prompts of 103 and
# completions of 325 tokens on average; four updates; FSDP, 40 rows at a time; a KL in the loss.
GSM8K = Job(
    prompt=103,
    lengths=long_tailed(1280, 325, 1024),
    generations=5,
    micro_batch=40 * 427,
    processes=4,
    layout=FSDP2,
    updates=4,
)


def _mathematics(rows: int, mean: int, processes: int) -> Job:
    """OpenMathInstruct-2 at up to 4096 tokens; prompts of 128 tokens, an exponential tail, and a
    reference are assumed.
    """
    return Job(
        prompt=128,
        lengths=long_tailed(rows, mean - 128, 4096 - 128),
        generations=16,
        processes=processes,
        layout=ZERO1,
        updates=4,
        references=1,
    )


POINTS = (
    _decoding(
        "vLLM 0.21, one H100, 1 request at a time (median)",
        "https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/",
        6.48,
        H100,
        "Llama-3-8B",
    ),
    _decoding(
        "the same, 4 requests; with 16 and 64 its client is the limit",
        "https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/",
        6.59,
        H100,
        "Llama-3-8B",
        rows=4,
    ),
    _decoding(
        "vLLM 0.23, one A100 (40 GB), 1 request at a time: 75 tokens/s",
        "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
        1e3 / 75,
        DEVICES["a100-40gb"],
        "Llama-3-8B",
        prompt=1024,
    ),
    _decoding(
        "vLLM, one A100, 1 request at a time",
        "https://github.com/tenstorrent/tt-inference-server/issues/340",
        4.2,
        DEVICES["a100"],
        "Qwen3-0.6B",
        width=1024,
    ),
    _decoding(
        "vLLM, two H100s that share the model, 1 request at a time",
        "https://github.com/tenstorrent/tt-inference-server/issues/143",
        30.9,
        H100,
        "Qwen2.5-72B",
        width=1024,
        gpus=2,
    ),
    _decoding(
        "SGLang 0.4.6, one H20, 1 request at a time: 2049 tokens at 414.17 tokens/s",
        "https://qwen.readthedocs.io/zh-cn/latest/getting_started/speed_benchmark.html",
        1e3 / 414.17,
        DEVICES["h20"],
        "Qwen3-0.6B",
        prompt=1,
        width=2048,
    ),
    Point(
        what="vLLM 0.5.3, one H100, 1000 requests at once, 256 tokens in and 256 out",
        source="https://github.com/vllm-project/vllm/pull/7117",
        kind="requests",
        published=24.29,
        unit="requests/s",
        device=H100,
        model="Llama-3-8B",
        setup={"count": 1000, "prompt": 256, "width": 256},
    ),
    _training(
        "torchtitan, 8 H100s (HBM2e), FSDP2, 2 x 8192 tokens, selective recomputing",
        TITAN_H100,
        5762,
        H100_HBM2E,
        "Llama-3-8B",
        tokens=16384,
        length=8192,
        gpus=8,
        recomputed=0.5,
    ),
    _training(
        "the same on 128",
        TITAN_H100,
        5605,
        H100_HBM2E,
        "Llama-3-8B",
        tokens=16384,
        length=8192,
        gpus=128,
        recomputed=0.5,
    ),
    _training(
        "torchtitan, 64 A100s, FSDP2, 8192 tokens, every second layer recomputed",
        TITAN_A100,
        2904,
        DEVICES["a100"],
        "Llama-3-8B",
        tokens=8192,
        length=8192,
        gpus=64,
        recomputed=0.5,
    ),
    _training(
        "torchtitan, 64 A100s, FSDP2, 2 x 4096 tokens, nothing recomputed",
        TITAN_A100,
        2162,
        DEVICES["a100"],
        "Llama-2-13B",
        tokens=8192,
        length=4096,
        gpus=64,
        recomputed=0.0,
    ),
    _training(
        "torchtitan, 64 A100s, FSDP2, 8192 tokens, all recomputed",
        TITAN_A100,
        331,
        DEVICES["a100"],
        "Llama-3-70B",
        tokens=8192,
        length=8192,
        gpus=64,
        recomputed=1.0,
    ),
    _training(
        "prime-rl, one H100, SFT, 8192 tokens, all recomputed",
        PRIME,
        26005,
        H100,
        "Qwen3-0.6B",
        tokens=8192,
        length=8192,
        gpus=1,
        recomputed=1.0,
    ),
    _training(
        "prime-rl, one H100, RL, 16384 tokens, all recomputed",
        PRIME,
        11896,
        H100,
        "Qwen3-0.6B",
        kind="learn",
        tokens=16384,
        length=16384,
        gpus=1,
        recomputed=1.0,
    ),
    _training(
        "prime-rl, 8 H100s, SFT, 16384 tokens, all recomputed",
        PRIME,
        49717 / 8,
        H100,
        "Qwen3-4B",
        tokens=16384,
        length=16384,
        gpus=8,
        recomputed=1.0,
    ),
    _training(
        "prime-rl, 8 H100s, RL, 16384 tokens, all recomputed",
        PRIME,
        26026 / 8,
        H100,
        "Qwen3-4B",
        kind="learn",
        tokens=16384,
        length=16384,
        gpus=8,
        recomputed=1.0,
    ),
    Point(
        what="verl 0.3, 4 GH200s, GRPO on GSM8K: old log-probabilities",
        source=VERL_LOG,
        kind="stage",
        published=3.566,
        unit="s",
        device=GH200,
        model="Qwen2.5-0.5B",
        setup={"job": GSM8K, "stage": "score"},
    ),
    Point(
        what="the same: update",
        source=VERL_LOG,
        kind="stage",
        published=14.302,
        unit="s",
        device=GH200,
        model="Qwen2.5-0.5B",
        setup={"job": GSM8K, "stage": "update"},
    ),
    Point(
        what="NeMo RL 0.5, 16 H100s, GRPO, 2048 rows of 1019 tokens on average",
        source=NEMO,
        kind="step",
        published=92.8,
        unit="s",
        device=H100,
        model="Llama-3-8B",
        setup={"job": _mathematics(128, 1019, 16)},
    ),
    Point(
        what="NeMo RL 0.4, 32 H100s, GRPO, 2048 rows of 3206 tokens on average",
        source=NEMO_04,
        kind="step",
        published=393.0,
        unit="s",
        device=H100,
        model="Qwen3-32B",
        setup={"job": _mathematics(64, 3206, 32)},
    ),
)


class Agreement(NamedTuple):
    """How far the model is off, as a factor: median and worst of the points."""

    count: int
    median: float
    worst: float


def agreement(points: Sequence[Point] = POINTS) -> Agreement:
    """With the constants as they are."""
    off = [point.off(Fitted()) for point in points]
    return Agreement(len(off), median(off), max(off))


# What is tried for each constant, by the kind of the points that it is fitted to.
GRIDS: dict[str, list[Fitted]] = {
    "train": [Fitted(e / 100, float(t)) for e, t in product(range(40, 81, 2), range(0, 81, 2))],
    "decode": [Fitted(host=h * 1e-4) for h in range(0, 51)],
}


@cache
def _losses(kind: str) -> list[list[float]]:
    """Squares of the logarithms by which every point is off, for everything that is tried."""
    points = [point for point in POINTS if point.kind == kind]
    return [[math.log(p.off(tried)) ** 2 for p in points] for tried in GRIDS[kind]]


def fit(kind: str, without: int | None = None) -> Fitted:
    """What is least off on all points of a kind, or on all but one of them."""
    losses = _losses(kind)
    sums = [sum(row) - (row[without] if without is not None else 0.0) for row in losses]
    return GRIDS[kind][sums.index(min(sums))]


def left_out(kind: str) -> Agreement:
    """Each point foretold with constants that are fitted to the others."""
    points = [point for point in POINTS if point.kind == kind]
    off = [point.off(fit(kind, i)) for i, point in enumerate(points)]
    return Agreement(len(off), median(off), max(off))
