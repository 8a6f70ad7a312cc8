"""The number of tokens that one process forwards at a time, if the config leaves it open."""

import os

import torch
from torch import nn

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.models import Policy, chunk_size_for
from rlhf_pg.plan.footprint import of_update
from rlhf_pg.plan.sharding import SHARDINGS, Sharding, memory_by_part
from rlhf_pg.runtime import Runtime

# More tokens at a time are hardly faster, since the kernels are busy. (6M parameters on a CPU: 512
# tokens cost 20 % more time than 2048, 1024 cost 4 %, and 16384 are as fast.)
MOST = {"cuda": 65536, "cpu": 1024}
# At least so many rows of the greatest length: with fewer, a prompt is computed more often.
ROWS = 4
# A model with fewer parameters takes less than a gigabyte for these tokens.
SMALL = 1_000_000
# Share of a GPU's free memory; the rest is lost between blocks and to the kernels' work space. For
# a CPU a share of all its memory, so that every run finds the same number and sums the same rows.
SHARE = {"cuda": 0.9, "cpu": 0.25}


def settled_budget(
    args: PolicyGradientConfig, module: nn.Module, runtime: Runtime, longest_prompt: int
) -> int:
    """Return `micro_batch_tokens`, for "auto" as many as fit beside the module; collective.

    The module is not sharded yet.
    """
    if args.micro_batch_tokens != "auto":
        return args.token_budget
    row = longest_prompt + args.max_completion_length
    kind = runtime.device.type
    tokens = most(kind, row)
    if kind == "cuda" or sum(p.numel() for p in module.parameters()) > SMALL:
        grown = of_update(module, args, longest_prompt, runtime.device)
        tokens = min(tokens, grown.tokens_within(_room(args, module, runtime)))
    return -runtime.all_reduce_max(-max(row, tokens))


def most(kind: str, row: int) -> int:
    """Return the tokens beyond which a device is hardly faster, for rows of this length."""
    return max(MOST[kind], ROWS * row)


def chunk_size(runtime: Runtime) -> int:
    """Return how many logits may be in memory at a time, the same on all processes; collective."""
    on_gpu = runtime.device.type == "cuda"
    memory = torch.cuda.mem_get_info(runtime.device)[1] if on_gpu else None
    return -runtime.all_reduce_max(-chunk_size_for(memory))


def reference_bytes(
    args: PolicyGradientConfig, policy: Policy, layout: Sharding, processes: int
) -> float:
    """Return the bytes on one process of a reference that it does not share with the policy.

    A fresh adapter (of `use_peft`) adds nothing, so a reference that stays needs none.
    """
    if args.beta == 0:
        return 0.0
    parameters = list(policy.parameters())
    fresh = args.use_peft and not args.sync_ref_model
    copied = 0 if fresh else sum(p.nbytes for p in parameters if p.requires_grad)
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    return (copied + frozen) / processes if layout.weights else float(copied)


def _room(args: PolicyGradientConfig, module: nn.Module, runtime: Runtime) -> float:
    """Return the bytes that a micro-batch may take on this process."""
    if runtime.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return SHARE["cpu"] * memory / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, total = torch.cuda.mem_get_info(runtime.device)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    awake = args.rollout_engine == "vllm" and not args.vllm_enable_sleep_mode
    engine = args.vllm_gpu_memory_utilization * total if awake else 0.0
    # What training will yet keep on the device.
    layout = next(layout for layout in SHARDINGS if layout.name == runtime.kind)
    due = memory_by_part(module.parameters(), layout, runtime.world, optim=args.optim)
    if not runtime.splits:
        del due["weights"]  # they are on the device already
    policy = next(part for part in module.modules() if isinstance(part, Policy))
    reference = reference_bytes(args, policy, layout, runtime.world)
    return SHARE["cuda"] * (free + unused - engine - sum(due.values()) - reference)
