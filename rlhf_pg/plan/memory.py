"""Bytes on one process, part by part, while it updates and while it samples."""

import math
from typing import NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from rlhf_pg.models.attention import fitness
from rlhf_pg.plan.footprint import reference_bytes, size, update_options
from rlhf_pg.plan.meta_models import Drawn
from rlhf_pg.plan.sharding import Layout, kept
from rlhf_pg.plan.token_budget import SHARE, most, within
from rlhf_pg.rollout.native.continuous_batching import MAX_ROWS
from rlhf_pg.rollout.native.decode_attention import KeyValues

FOUR_BITS = 0.6  # bytes of a weight in NF4, with its scales and the layers that are left alone
CPU_CACHE = 4 * 2**30  # bytes that the native engine takes of a CPU's memory


class Memory(NamedTuple):
    """Bytes of each part, and what follows from the room that they leave."""

    update: dict[str, float]
    rollout: dict[str, float]
    micro_batch_tokens: int
    rows: int  # that are sampled at a time


def predicted_memory(
    drawn: Drawn, layout: Layout, processes: int, room: float, kind: str
) -> Memory:
    """What one process keeps.

    Args:
        room: bytes of its device.
        kind: "cuda" or "cpu".
    """
    update, rollout = (_kept(drawn, layout, processes, sampling) for sampling in (False, True))
    copied = _adapted(drawn.policy) if not drawn.args.load_in_4bit else 0.0
    rollout["copy to sample from"] = rollout.get("copy to sample from", 0.0) + copied
    left = room - sum(update.values()) if kind == "cuda" else room
    tokens = _budget(drawn, SHARE[kind] * left, kind)
    taken = drawn.update.at(_largest(drawn, processes, tokens))
    update["activations"] = taken.layers
    update["head, loss, backward"] = max(0.0, taken.peak - taken.layers)
    left = (room - sum(rollout.values())) / 2 if kind == "cuda" else CPU_CACHE
    rollout["keys and values"], rows = _cache(drawn, processes, max(left, 0.0))
    return Memory(update, rollout, tokens, rows)


def _budget(drawn: Drawn, room: float, kind: str) -> int:
    """`micro_batch_tokens`, as a trainer would find it."""
    if drawn.args.micro_batch_tokens != "auto":
        return drawn.args.token_budget
    row = drawn.prompt + drawn.args.max_completion_length
    return max(row, within(drawn.update, room, most(kind, row)))


def _kept(drawn: Drawn, layout: Layout, processes: int, sampling: bool) -> dict[str, float]:
    """Of policy, critic and reference, without activations."""
    policy = list(drawn.policy.parameters())
    options = update_options(drawn.args)
    own = kept(policy, layout, processes, sampling, **options)
    if drawn.args.load_in_4bit:
        frozen = [p for p in policy if not p.requires_grad]
        own["weights"] -= size(frozen) - FOUR_BITS * sum(p.numel() for p in frozen)
    parts = {
        "weights": own["weights"],
        "gradients": own.get("gradients", 0.0) + own.get("buckets", 0.0),
        "optimizer": own.get("moments", 0.0) + own.get("masters", 0.0),
    }
    if sampling:
        parts["copy to sample from"] = own.get("copy", 0.0)
    if drawn.critic is not None:
        shared = set() if layout.weights else {id(p) for p in policy}
        rest = [p for p in drawn.critic.parameters() if id(p) not in shared]
        critic = kept(rest, layout, processes, sampling, **options)
        critic.pop("copy", None)  # nothing is sampled from it
        parts["critic"] = sum(critic.values())
    parts["reference"] = reference_bytes(drawn.args, drawn.policy, layout, processes)
    return parts


def _adapted(policy: nn.Module) -> float:
    """Of the weights that adapters are merged into, in copies."""
    layers = [m for m in policy.modules() if isinstance(m, BaseTunerLayer)]
    return float(size(p for layer in layers for p in layer.get_base_layer().parameters()))


def _largest(drawn: Drawn, processes: int, budget: int) -> float:
    """Tokens of the largest micro-batch, if all rows are as long as they may be."""
    args = drawn.args
    groups = math.ceil(math.ceil(args.prompts_per_step / args.num_mini_batches) / processes)
    return min(budget, groups * drawn.update.first.tokens)


def _cache(drawn: Drawn, processes: int, room: float) -> tuple[float, int]:
    """Bytes of keys and values when all rows have their last token, and how many rows that is."""
    args, each = drawn.args, fitness(drawn.policy.model).bytes_per_token
    groups = math.ceil(args.prompts_per_step / processes)
    tokens = args.rollout_cache_tokens or int(room // max(each, 1))
    fitting = (tokens - groups * drawn.prompt) // args.max_completion_length
    rows = max(1, min(MAX_ROWS, fitting, groups * args.num_generations))
    prompts = KeyValues(tokens // 2, longest=tokens)
    own = KeyValues(tokens // 2, longest=args.max_completion_length)
    prompts.reserve(math.ceil(rows / args.num_generations), drawn.prompt)
    for width in range(1, args.max_completion_length + 1):
        own.reserve(rows, width)
    return float(each * sum(store.slots * store.width for store in (prompts, own))), rows
