"""Estimates of the seconds of a rollout, from kernels launched, bytes read and operations."""

import math
from dataclasses import dataclass

from rlhf_pg.plan.devices import Device
from rlhf_pg.plan.job import Job, positions
from rlhf_pg.plan.learning import EFFICIENCY, MEMORY, body_seconds
from rlhf_pg.plan.shapes import Shape

KERNEL = 2.0e-6  # seconds of a small kernel in a CUDA graph, its gap included: an assumption
OUTSIDE = 21  # kernels of a position that are in no layer
LOOK = 8  # positions after which the native engine looks for rows that have ended
REDUCE = 10e-6  # seconds of a small sum over the GPUs of one machine: an assumption
# What vLLM's host adds to a position, in seconds. Fitted: see docs/scaling.md.
HOST = 1.7e-3


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The costs of an engine that makes one token of every row at a time.

    Args:
        kernels: kernels of a layer, in a graph.
        drawing: kernels of a position that draw its tokens, in a graph.
        host: seconds that the host adds to a position.
        moves: operations of a layer that make room for rows, every `LOOK` positions.
        cache_rate: share of the bandwidth at which keys and values are read.
        shares_prompts: whether those of a prompt are read once for all its completions.
        logits: number of times that logits are read or written.
    """

    kernels: int
    drawing: int
    host: float
    moves: int
    cache_rate: float
    shares_prompts: bool
    logits: int


# `make test-sm90` counts its kernels; 140 more draw a token. The rate of its cache is assumed: the
# kernel reads true lengths, and does not split them among its blocks.
NATIVE = Engine(
    kernels=15,
    drawing=140,
    host=0.0,
    moves=4,
    cache_rate=0.65,
    shares_prompts=True,
    logits=12,
)
VLLM = Engine(
    kernels=12,
    drawing=0,
    host=HOST,
    moves=0,
    cache_rate=0.8,
    shares_prompts=False,
    logits=4,
)


def rollout_seconds(
    engine: Engine, device: Device, shape: Shape, job: Job, gpus: int = 1, host: float | None = None
) -> float:
    """Estimate the seconds of sampling all completions: prompts once, then position after position.

        prompts    2 (body + head) groups P / rate, and what is read and written between products
        position   (L k + 21 + drawing) KERNEL + host
                   + max(2 N / (0.85 bandwidth), 2 N rows / rate)
                   + tokens cached / (cache_rate bandwidth) + logits 4 rows V / bandwidth
        looks      (25 + moves L) 15 us, every 8 positions

    N are the parameters that a token passes through. With `gpus` that share a model, everything but
    the kernels is divided among them, and 2 L sums are added.

    Args:
        host: seconds per position, in place of the engine's own.
    """
    host = engine.host if host is None else host
    look = (25 + engine.moves * shape.layers) * 15e-6 / LOOK if engine.moves else 0.0
    fixed = (shape.layers * engine.kernels + OUTSIDE + engine.drawing) * KERNEL
    fixed += host + look + (2 * shape.layers * REDUCE if gpus > 1 else 0.0)
    prompts = job.groups * gpus * job.prompt
    seconds = body_seconds(device, shape, prompts, prompts * job.prompt / 2) / gpus
    for rows, tokens in positions(job.lengths * gpus, job.rows * gpus):
        read = math.ceil(rows / job.generations) if engine.shares_prompts else rows
        seconds += fixed + _moved(engine, device, shape, rows, read * job.prompt + tokens) / gpus
    return seconds


def _moved(engine: Engine, device: Device, shape: Shape, rows: int, tokens: float) -> float:
    """Estimate the seconds that bytes and operations of one position take on one GPU.

    Args:
        tokens: number of tokens whose keys and values are read.
    """
    weights = 2 * shape.read / (MEMORY * device.bandwidth)
    products = 2 * shape.read * rows / (EFFICIENCY * device.flops)
    cache = tokens * shape.cached / (engine.cache_rate * device.bandwidth)
    logits = engine.logits * 4 * rows * shape.vocabulary / device.bandwidth
    return max(weights, products) + cache + logits
