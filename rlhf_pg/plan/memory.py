"""Bytes on one process, part by part, while it updates and while it samples."""

import math
from typing import NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from rlhf_pg.models.attention import attention_support
from rlhf_pg.plan.footprint import reference_bytes, size, update_options
from rlhf_pg.plan.meta_models import MetaModels
from rlhf_pg.plan.sharding import Sharding, memory_by_part
from rlhf_pg.plan.token_budget import SHARE, most, within
from rlhf_pg.rollout.native.continuous_batching import MAX_ROWS
from rlhf_pg.rollout.native.decode_attention import KeyValues

FOUR_BITS = 0.6  # bytes of a weight in NF4, with its scales and the layers that are left alone
CPU_CACHE = 4 * 2**30  # bytes that the native engine takes of a CPU's memory


class Memory(NamedTuple):
    """The bytes of each part, and what fits in the room that they leave."""

    update: dict[str, float]
    rollout: dict[str, float]
    micro_batch_tokens: int
    rows: int  # that are sampled at a time


def predicted_memory(
    meta: MetaModels, layout: Sharding, processes: int, room: float, kind: str
) -> Memory:
    """Estimate what one process keeps in memory.

    Args:
        room: bytes of its device.
        kind: "cuda" or "cpu".
    """
    update, rollout = (_kept(meta, layout, processes, sampling) for sampling in (False, True))
    copied = _adapted(meta.policy) if not meta.args.load_in_4bit else 0.0
    rollout["copy to sample from"] = rollout.get("copy to sample from", 0.0) + copied
    left = room - sum(update.values()) if kind == "cuda" else room
    tokens = _budget(meta, SHARE[kind] * left, kind)
    taken = meta.update.at(_largest(meta, processes, tokens))
    update["activations"] = taken.layers
    update["head, loss, backward"] = max(0.0, taken.peak - taken.layers)
    left = (room - sum(rollout.values())) / 2 if kind == "cuda" else CPU_CACHE
    rollout["keys and values"], rows = _cache(meta, processes, max(left, 0.0))
    return Memory(update, rollout, tokens, rows)


def _budget(meta: MetaModels, room: float, kind: str) -> int:
    """Return `micro_batch_tokens` as a trainer would find it."""
    if meta.args.micro_batch_tokens != "auto":
        return meta.args.token_budget
    row = meta.prompt + meta.args.max_completion_length
    return max(row, within(meta.update, room, most(kind, row)))


def _kept(meta: MetaModels, layout: Sharding, processes: int, sampling: bool) -> dict[str, float]:
    """Return the bytes of policy, critic and reference, without activations."""
    policy = list(meta.policy.parameters())
    options = update_options(meta.args)
    own = memory_by_part(policy, layout, processes, sampling, **options)
    if meta.args.load_in_4bit:
        frozen = [p for p in policy if not p.requires_grad]
        own["weights"] -= size(frozen) - FOUR_BITS * sum(p.numel() for p in frozen)
    parts = {
        "weights": own["weights"],
        "gradients": own.get("gradients", 0.0) + own.get("buckets", 0.0),
        "optimizer": own.get("moments", 0.0) + own.get("masters", 0.0),
    }
    if sampling:
        parts["copy to sample from"] = own.get("copy", 0.0)
    if meta.critic is not None:
        shared = set() if layout.weights else {id(p) for p in policy}
        rest = [p for p in meta.critic.parameters() if id(p) not in shared]
        critic = memory_by_part(rest, layout, processes, sampling, **options)
        critic.pop("copy", None)  # nothing is sampled from it
        parts["critic"] = sum(critic.values())
    parts["reference"] = reference_bytes(meta.args, meta.policy, layout, processes)
    return parts


def _adapted(policy: nn.Module) -> float:
    """Return the bytes of copies of the weights that adapters are merged into."""
    layers = [m for m in policy.modules() if isinstance(m, BaseTunerLayer)]
    return float(size(p for layer in layers for p in layer.get_base_layer().parameters()))


def _largest(meta: MetaModels, processes: int, budget: int) -> float:
    """Return the tokens of the largest micro-batch, if all rows have their greatest length."""
    args = meta.args
    groups = math.ceil(math.ceil(args.prompts_per_step / args.num_mini_batches) / processes)
    return min(budget, groups * meta.update.first.tokens)


def _cache(meta: MetaModels, processes: int, room: float) -> tuple[float, int]:
    """Return the bytes of keys and values at every row's last token, and how many rows fit."""
    args, each = meta.args, attention_support(meta.policy.model).bytes_per_token
    groups = math.ceil(args.prompts_per_step / processes)
    tokens = args.rollout_cache_tokens or int(room // max(each, 1))
    fitting = (tokens - groups * meta.prompt) // args.max_completion_length
    rows = max(1, min(MAX_ROWS, fitting, groups * args.num_generations))
    prompts = KeyValues(tokens // 2, longest=tokens)
    own = KeyValues(tokens // 2, longest=args.max_completion_length)
    prompts.reserve(math.ceil(rows / args.num_generations), meta.prompt)
    for width in range(1, args.max_completion_length + 1):
        own.reserve(rows, width)
    stores = (prompts, own)
    return float(each * sum(store.slots * store.width for store in stores)), rows
