"""Estimates of the seconds of scoring and updating, from operations, bytes and exchanges."""

import math
from typing import Literal, NamedTuple

from rlhf_pg.plan.devices import Device
from rlhf_pg.plan.job import Job
from rlhf_pg.plan.shapes import Shape

# Shares of the peak of matrix products, and times that each layer's numbers are read or written
# between them in a forward pass. Fitted: see docs/scaling.md.
EFFICIENCY = 0.8
TRAFFIC = 44.0
MEMORY = 0.85  # share of the bandwidth that a large read reaches: an assumption, as are those below
LAUNCH = 6.5e-6  # seconds from one kernel to the next without a graph
KERNELS = 60  # in a layer's forward pass without a graph
EXPOSED = 0.2  # share of an exchange that no computing hides
OPTIMIZER = 28  # bytes of moments, masters, gradients and weights, read and written
HEAD_KERNELS = 30  # for one piece of the head


class TokenCounts(NamedTuple):
    """The tokens that a learner computes in one pass over its completions."""

    body: float  # tokens that pass through the layers
    pairs: float  # (query, key) that attend
    head: float  # tokens that pass through the head


Rows = Literal["shared", "unpadded", "padded"]


def tokens_of(rows: Rows, job: Job) -> TokenCounts:
    """Count what is computed of prompts of P and completions of l tokens.

    shared     a prompt once for its group:  sum l + groups P
    unpadded   every row without padding:    sum (P + l), and the head on prompts too
    padded     every row as the longest:     rows (P + longest)
    """
    p, lengths = job.prompt, job.lengths
    if rows == "padded":
        width = p + max(lengths)
        count = len(lengths)
        return TokenCounts(count * width, count * width**2 / 2, count * max(lengths))
    real = sum(lengths)
    if rows == "unpadded":
        every = real + len(lengths) * p
        return TokenCounts(every, sum((p + n) ** 2 / 2 for n in lengths), every)
    pairs = sum(n * p + n**2 / 2 for n in lengths) + job.groups * p**2 / 2
    return TokenCounts(real + job.groups * p, pairs, real)


def body_seconds(
    device: Device,
    shape: Shape,
    tokens: float,
    pairs: float,
    passes: float = 1.0,
    efficiency: float = EFFICIENCY,
    traffic: float = TRAFFIC,
) -> float:
    """Estimate the seconds of the layers, a forward pass being 1 and a backward pass 2.

    passes ((2 body tokens + 4 L attention pairs) / (efficiency peak)
            + traffic 2 L (hidden + attention + inner) tokens / (0.85 bandwidth))
    """
    work = 2 * shape.body * tokens + 4 * shape.layers * shape.attention * pairs
    numbers = shape.layers * (shape.hidden + shape.attention + shape.inner) * tokens
    moved = traffic * 2 * numbers / (MEMORY * device.bandwidth)
    return passes * (work / (efficiency * device.flops) + moved)


def head_seconds(
    device: Device,
    shape: Shape,
    tokens: float,
    piece: float,
    products: int,
    backward: bool = True,
    efficiency: float = EFFICIENCY,
) -> float:
    """Estimate the seconds of logits and their log-probabilities, one piece after the other.

        n = tokens V / piece pieces, of r = piece / V tokens each:
        n (products max(2 V H / bandwidth, 2 V H r / (efficiency peak))
           + 8 V H / bandwidth [the weight's gradient, summed in float32]
           + passes 4 piece / bandwidth + 30 LAUNCH)

    with 16 passes over the logits, 4 without a backward pass.

    Args:
        piece: logits that are in memory at a time.
        products: matrix products with the head, one of them in the forward pass.
    """
    count = tokens * shape.vocabulary / piece
    rows = piece / shape.vocabulary
    each = max(
        2 * shape.head / device.bandwidth, 2 * shape.head * rows / (efficiency * device.flops)
    )
    summed = 8 * shape.head / device.bandwidth if backward else 0.0
    logits = (16 if backward else 4) * 4 * piece / device.bandwidth
    return count * (products * each + summed + logits + HEAD_KERNELS * LAUNCH)


def micro_batches(tokens: float, job: Job) -> int:
    return math.ceil(tokens / job.micro_batch)


def launched(seconds: float, passes: float, shape: Shape, batches: int) -> float:
    """Return the seconds of the slower of the GPU and the host that launches its kernels."""
    return max(seconds, batches * passes * KERNELS * shape.layers * LAUNCH)


def optimizer_seconds(device: Device, shape: Shape, job: Job) -> float:
    """Estimate the seconds of the optimizer's pass over its share of the state."""
    share = job.processes if job.layout.moments else 1
    kept = OPTIMIZER * shape.parameters * job.trained / share
    return job.updates * kept / (MEMORY * device.bandwidth)


def gather_seconds(device: Device, shape: Shape, processes: int, times: float = 1.0) -> float:
    """Estimate the seconds of sending `times` (N-1)/N 2P bytes in a ring of N."""
    share = (processes - 1) / processes
    return times * share * 2 * shape.parameters / device.ring(processes)


def exchanges(job: Job, batches: int, scores: int) -> float:
    """Count how often (N-1)/N 2P bytes travel in a step, the rollout apart.

    DDP, ZeRO-1      2 per update, of what is trained
    ZeRO-2           1 per micro-batch and 1 per update, of what is trained
    ZeRO-3, FSDP2    2 per micro-batch, and 1 of what is trained; 1 per micro-batch scored
    """
    learnt = batches * job.epochs
    if job.layout.weights:
        return learnt * (2 + job.trained) + batches * scores
    if job.layout.gradients:
        return (learnt + job.updates) * job.trained
    return 2 * job.updates * job.trained
