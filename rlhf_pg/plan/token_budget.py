"""How many tokens one process forwards at a time, where the config leaves it open."""

import os

import torch
from torch import nn

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.models import Policy, chunk_size_for
from rlhf_pg.plan.footprint import Growth, of_update, reference_bytes, update_options
from rlhf_pg.plan.sharding import SHARDINGS, memory_by_part
from rlhf_pg.runtime import Runtime

# More tokens at a time are not much faster: then the kernels are busy anyway. (On a CPU, of 6M
# parameters: 512 tokens cost 20 % more time than 2048, 1024 cost 4 %, and 16384 are as fast.)
MOST = {"cuda": 65536, "cpu": 1024}

# Of rows as long as they may be, so many are not too many: fewer compute a prompt more often.
ROWS = 4

# Parameters of a model with which so few tokens take less than a gigabyte.
SMALL = 1_000_000

# Of what is free on a GPU: the rest is lost between blocks, and to the kernels' own work space. Of
# a CPU's memory a part that is the same in every run, and with it the sums of the same rows.
SHARE = {"cuda": 0.9, "cpu": 0.25}


def settled_budget(
    args: PolicyGradientConfig, module: nn.Module, runtime: Runtime, longest_prompt: int
) -> int:
    """`micro_batch_tokens`, or for auto a number that fits, the same on all processes; collective.

    Args:
        module: what trains, before it is shared out, and before there is a reference.
    """
    if args.micro_batch_tokens != "auto":
        return args.token_budget
    row = longest_prompt + args.max_completion_length
    kind = runtime.device.type
    tokens = most(kind, row)
    if kind == "cuda" or sum(p.numel() for p in module.parameters()) > SMALL:
        grown = of_update(module, args, longest_prompt, runtime.device)
        tokens = within(grown, _room(args, module, runtime), tokens)
    return -runtime.all_reduce_max(-max(row, tokens))


def most(kind: str, row: int) -> int:
    """Tokens beyond which more are hardly faster on such a device, for rows of this length."""
    return max(MOST[kind], ROWS * row)


def chunk_size(runtime: Runtime) -> int:
    """Logits that may live at a time, the same number on all processes; collective."""
    on_gpu = runtime.device.type == "cuda"
    memory = torch.cuda.mem_get_info(runtime.device)[1] if on_gpu else None
    return -runtime.all_reduce_max(-chunk_size_for(memory))


def within(grown: Growth, room: float, most: int) -> int:
    """Tokens of a micro-batch that fits so many bytes, at most so many; at least 1."""
    return max(1, min(most, grown.tokens_within(room)))


def _room(args: PolicyGradientConfig, module: nn.Module, runtime: Runtime) -> float:
    """Bytes that a micro-batch may take on this process."""
    if runtime.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return SHARE["cpu"] * memory / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, total = torch.cuda.mem_get_info(runtime.device)
    reserved, taken = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    awake = args.rollout_engine == "vllm" and not args.vllm_enable_sleep_mode
    engine = args.vllm_gpu_memory_utilization * total if awake else 0.0
    due = _due(args, module, runtime)
    return SHARE["cuda"] * (free + reserved - taken - engine - due)


def _due(args: PolicyGradientConfig, module: nn.Module, runtime: Runtime) -> float:
    """Bytes that training is still going to keep on the device of this process."""
    layout = next(layout for layout in SHARDINGS if layout.name == runtime.kind)
    own = memory_by_part(module.parameters(), layout, runtime.world, **update_options(args))
    if not runtime.splits:
        del own["weights"]  # which are there
    policy = next(part for part in module.modules() if isinstance(part, Policy))
    return sum(own.values()) + reference_bytes(args, policy, layout, runtime.world)
