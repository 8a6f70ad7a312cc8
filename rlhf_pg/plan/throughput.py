"""The seconds of a step: floating-point operations and bytes, each at the rate of the device."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from rlhf_pg.data.records import Rollout
from rlhf_pg.models.attention import attention_support
from rlhf_pg.plan.footprint import forward_work, probe, size
from rlhf_pg.plan.memory import Memory
from rlhf_pg.plan.meta_models import MetaModels


class Rates(NamedTuple):
    """The rates of one device."""

    work: float  # floating-point operations per second, of large matrix products
    bytes: float  # per second, read or written


class Pace(NamedTuple):
    """The work of one phase of a step, on one process."""

    work: float  # floating-point operations
    bytes: float  # read or written, of weights, caches and optimizer state

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of the slower of operations and bytes."""
        return max(self.work / rates.work, self.bytes / rates.bytes)


def predicted_pace(meta: MetaModels, memory: Memory, processes: int) -> dict[str, Pace]:
    """Estimate rollout, score and update, without rewards, if all rows have the greatest length."""
    groups = math.ceil(meta.args.prompts_per_step / processes)
    return {
        "rollout": _rollout(meta, memory, groups),
        "score": _score(meta, groups),
        "update": _update(meta, memory, groups),
    }


def _rollout(meta: MetaModels, memory: Memory, groups: int) -> Pace:
    """Estimate a rollout: prompts once per group; all weights and the cache at every position."""
    args, width = meta.args, meta.args.max_completion_length
    row = meta.prompt + width
    rows = groups * args.num_generations
    work = forward_work(meta.policy, probe(1, 1, meta.prompt, width, meta.device)) / row
    cached = attention_support(meta.policy.model).bytes_per_token * width
    read = cached * (groups * meta.prompt + rows * width / 2)
    turns = math.ceil(rows / memory.rows) * width
    weights = size(meta.policy.parameters())
    return Pace(work * (groups * meta.prompt + rows * width), turns * weights + read)


def _score(meta: MetaModels, groups: int) -> Pace:
    """Estimate one forward pass of each model that scores."""
    args = meta.args
    policy = forward_work(meta.policy, _group(meta)) * groups
    together = meta.update.first.forward_work * groups
    computes_old = args.needs_old_logprobs and args.old_logprobs_source == "policy"
    asks = computes_old or (meta.critic is not None and meta.critic.shares_trunk)
    work = together if asks else together - policy if meta.critic is not None else 0.0
    models = int(asks) + int(args.beta > 0)
    work += policy if args.beta > 0 else 0.0
    return Pace(work, models * size(meta.policy.parameters()))


def _update(meta: MetaModels, memory: Memory, groups: int) -> Pace:
    """Estimate forward and backward of every row, and the optimizer's pass over its state."""
    args, one = meta.args, meta.update.first
    tokens = groups * one.tokens
    passes = math.ceil(tokens / memory.micro_batch_tokens)
    weights = size(meta.policy.parameters())
    # Weights forward, backward, and gradients; then all that an update keeps, read and written.
    read = args.num_iterations * passes * 3 * weights
    kept = sum(memory.update[part] for part in ("weights", "gradients", "optimizer"))
    return Pace(args.num_iterations * groups * one.work, read + args.updates_per_step * 2 * kept)


def _group(meta: MetaModels) -> Rollout:
    args = meta.args
    return probe(1, args.num_generations, meta.prompt, args.max_completion_length, meta.device)


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates of this machine by one large matrix product and one large copy."""
    on_gpu = device.type == "cuda"
    side, length = (8192, 2**30) if on_gpu else (1024, 2**26)
    a = torch.ones(side, side, device=device, dtype=dtype)
    b = torch.empty_like(a)
    source = torch.ones(length, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    work = 2 * side**3 / _fastest(lambda: torch.mm(a, a, out=b), device)
    return Rates(work, 2 * length / _fastest(lambda: target.copy_(source), device))


def _fastest(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the seconds of the fastest of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
