"""Estimates of the seconds of a training step, by stage: ours, TRL and verl by one formula each.

A library is a row of data, and libraries differ in nothing else.
"""

import math
from dataclasses import dataclass

from rlhf_pg.plan.decoding import NATIVE, VLLM, Engine, rollout_seconds
from rlhf_pg.plan.devices import MACHINE, Device
from rlhf_pg.plan.job import Job
from rlhf_pg.plan.learning import (
    EXPOSED,
    Rows,
    body_seconds,
    exchanges,
    gather_seconds,
    head_seconds,
    launched,
    micro_batches,
    optimizer_seconds,
    tokens_of,
)
from rlhf_pg.plan.shapes import Shape

WAKE = 0.5  # seconds in which vLLM sleeps and wakes up: an assumption
LOADED = 40e9  # bytes per second at which it takes weights over: an assumption
CACHE_SHARE = 0.3  # of a GPU's memory is left to keys and values when vLLM samples


@dataclass(frozen=True, kw_only=True)
class Library:
    """The way in which a library takes a step.

    Args:
        rows: how its learner computes prompts and padding.
        engine: the engine that samples.
        in_process: whether the engine samples from the policy's own weights.
        parallel: whether its engine can share one model among the GPUs of a machine.
        scores: forward passes before an update with one update per rollout.
        recomputes: whether gradient checkpointing is on by default.
        piece: logits in memory at a time; None: those of a micro-batch.
        products: matrix products with the head in an update.
        critics: whether it has PPO.
    """

    name: str
    rows: Rows
    engine: Engine
    in_process: bool = False
    parallel: bool = False
    scores: int = 0
    recomputes: bool = False
    piece: float | None = 2.0**29
    products: int = 4
    critics: bool = True


NATIVELY = Library(name="ours, native", rows="shared", engine=NATIVE, in_process=True)
WITH_VLLM = Library(name="ours, vLLM", rows="shared", engine=VLLM)
# With vLLM it scores for its correction of the sampler; the fused head has tiles of 4096 x 32768.
TRL = Library(
    name="TRL, vLLM",
    rows="padded",
    engine=VLLM,
    parallel=True,
    scores=1,
    recomputes=True,
    piece=2.0**27,
    critics=False,
)
# It scores although one update per rollout needs no old log-probabilities, and keeps the logits.
VERL = Library(
    name="verl",
    rows="unpadded",
    engine=VLLM,
    parallel=True,
    scores=1,
    recomputes=True,
    piece=None,
    products=3,
)
LIBRARIES = (NATIVELY, WITH_VLLM, TRL, VERL)


def stages(library: Library, device: Device, shape: Shape, job: Job) -> dict[str, float]:
    """Estimate the seconds of a step by stage; they add up to `total`.

    Raises:
        ValueError: its engine cannot sample from a model of this size on such a GPU.
    """
    gpus = engine_gpus(library, device, shape, job)
    score, update, exchange = learner_seconds(library, device, shape, job)
    parts = {
        "rollout": rollout_seconds(library.engine, device, shape, job, gpus),
        "weights handed over": handover_seconds(library, device, shape, job),
        "score": score,
        "update": update,
        "exchange": exchange,
    }
    return parts | {"total": sum(parts.values())}


def engine_gpus(library: Library, device: Device, shape: Shape, job: Job) -> int:
    """Return the number of GPUs that share one engine's weights: the fewest that leave room for a
    cache.

    Raises:
        ValueError: there are not enough.
    """
    room = (1 - CACHE_SHARE) * device.memory
    gpus = 1 << max(0, math.ceil(math.log2(2 * shape.parameters / room)))
    if gpus > (min(job.processes, MACHINE) if library.parallel else 1):
        raise ValueError(f"{library.name}: the engine's weights do not fit in {room / 1e9:.0f} GB")
    return gpus


def learner_seconds(
    library: Library, device: Device, shape: Shape, job: Job
) -> tuple[float, float, float]:
    """Estimate the seconds of scoring, of updating, and of exchanges that no computing hides.

    score      forwards (body + head): the policy's if asked for, references, critics
    update     epochs (3 body, 2 of them the backward pass, + 1 if it recomputes, + head)
               + optimizer
    exchange   max(0.2 exchanges, exchanges - score - update)
    """
    tokens = tokens_of(library.rows, job)
    batches = micro_batches(tokens.body, job)
    scores = max(library.scores, job.old) + job.references + job.models - 1
    recomputes = library.recomputes or job.recomputes
    passes = (2 + job.trained + recomputes) * job.epochs
    piece = library.piece or job.micro_batch * shape.vocabulary
    piece = min(piece, max(1, tokens.head / batches) * shape.vocabulary)
    products = library.products - (job.trained < 1)
    body, pairs, head = tokens
    forward = body_seconds(device, shape, body, pairs)
    score = scores * (
        launched(forward, 1, shape, batches)
        + head_seconds(device, shape, head, piece, 1, backward=False)
    )
    update = launched(passes * forward, passes, shape, batches)
    update += job.epochs * head_seconds(device, shape, head, piece, products, job.trained == 1)
    update = job.models * (update + optimizer_seconds(device, shape, job))
    times = job.models * exchanges(job, batches, scores)
    sent = gather_seconds(device, shape, job.processes, times)
    return score, update, max(EXPOSED * sent, sent - score - update)


def handover_seconds(library: Library, device: Device, shape: Shape, job: Job) -> float:
    """Estimate the seconds until the engine has the new weights: gathered if sharded, then loaded.

    The native engine samples from the weights in place; adapters are merged into a copy.
    """
    gathered = job.layout.weights and job.processes > 1
    seconds = gather_seconds(device, shape, job.processes) if gathered else 0.0
    if library.in_process:
        copied = 4 * shape.parameters if job.trained < 1 else 0.0  # read and written
        return seconds + copied / device.bandwidth
    return seconds + WAKE + 2 * shape.parameters / LOADED
