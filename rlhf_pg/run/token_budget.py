"""The number of tokens in a micro-batch for `micro_batch_tokens: auto`.

It follows from the bytes that a process keeps, and those of a pass, measured without data.
"""

import copy
import logging
import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.method import AWAKE
from rlhf_pg.data import Batch, Row
from rlhf_pg.models.attention import measurable_experts
from rlhf_pg.models.lm_head import MeasuringMode, chunk_size_for
from rlhf_pg.models.packing import can_pack
from rlhf_pg.models.policy import (
    Policy,
    checkpoint_activations,
    checkpoints,
    offloads,
)
from rlhf_pg.runtime import DDPBackend, Runtime

logger = logging.getLogger(__name__)

# More tokens at a time are hardly faster, since the kernels are busy. (6M parameters on a CPU: 512
# tokens take 20 % longer than 2048, 1024 take 4 % longer, and 16384 are as fast.)
MOST = {"cuda": 65536, "cpu": 1024}
# At least this many rows of the greatest length: with fewer, a prompt is computed more often.
ROWS = 4
# A model with fewer parameters takes less than a gigabyte for these tokens.
SMALL = 1_000_000
# Groups in the largest micro-batch that is measured.
MOST_GROUPS = 16
# Share of a GPU's free memory; the rest is lost to fragmentation and the kernels' workspace. On a
# CPU a share of all its memory, so that every run finds the same number and sums the same rows.
SHARE = {"cuda": 0.9, "cpu": 0.25}
# Bytes that vLLM keeps while it sleeps: the CUDA context, graphs and workspace of its process.
ASLEEP = 2.5e9
LEAST_SHARE = 0.01  # which vLLM refuses with numbers


class Sharding(NamedTuple):
    """Which parts a backend splits among the processes; the rest is whole on each."""

    name: str
    weights: bool
    gradients: bool
    moments: bool
    deepspeed: bool


SHARDINGS = (
    Sharding("DDP", False, False, False, False),
    Sharding("ZeRO-1", False, False, True, True),
    Sharding("ZeRO-2", False, True, True, True),
    Sharding("ZeRO-3", True, True, True, True),
    Sharding("FSDP2", True, True, True, False),
)


def find_budget(
    args: PolicyGradientConfig,
    module: nn.Module,
    runtime: Runtime,
    longest_prompt: int,
    teacher: nn.Module | None = None,
) -> int:
    """Return `micro_batch_tokens`, for "auto" as many as fit beside the module, which is not
    sharded yet; one row if no pass can be measured. Collective.
    """
    if args.micro_batch_tokens != "auto":
        return int(args.micro_batch_tokens)
    row = longest_prompt + args.max_completion_length
    kind = runtime.device.type
    tokens = most(kind, row)
    if kind == "cuda" or sum(p.numel() for p in module.parameters()) > SMALL:
        try:
            grown = of_update(module, args, longest_prompt, runtime.device)
            tokens = min(
                tokens,
                grown.tokens_within(_room(args, module, runtime, teacher)),
            )
        except Exception as error:  # a kernel or a value model that reads data
            tokens = row
            logger.warning(
                "micro_batch_tokens: the model's memory cannot be measured (%s), so one row is "
                "computed at a time: set a number, which is faster",
                error,
            )
    return -runtime.all_reduce_max(-max(row, tokens))


def most(kind: str, row: int) -> int:
    """Return the tokens beyond which a device is hardly faster, for rows of this length."""
    return max(MOST[kind], ROWS * row)


def chunk_size(runtime: Runtime) -> int:
    """Return the largest number of logits in memory, the same on all processes; collective."""
    on_gpu = runtime.device.type == "cuda"
    memory = torch.cuda.mem_get_info(runtime.device)[1] if on_gpu else None
    return -runtime.all_reduce_max(-chunk_size_for(memory))


# ------------------------------------------------------------------------- what a process keeps


def memory_by_part(
    parameters: Iterable[Tensor],
    layout: Sharding,
    processes: int,
    rollout: bool = False,
    optim: str = "",
) -> dict[str, float]:
    """Return the bytes that a process keeps for parameters, by part, to update or sample."""
    total: dict[str, float] = {}
    for parameter in {id(p): p for p in parameters}.values():
        b = parameter.element_size()
        each = {"weights": b / (processes if layout.weights else 1)}
        if rollout:
            each["copy to sample from"] = b if layout.weights else 0
        if parameter.requires_grad:
            # The moments of torch's AdamW have the dtype of the updated weights (16 bits: masters).
            moments = 8 if layout.deepspeed else 2 * max(b, 4)
            moments = 2 if optim == "adamw_8bit" else moments
            # In float32 ZeRO-3 updates its shard of the weights; ZeRO-1 and ZeRO-2 copy it first.
            masters = 4 if b < 4 or (layout.deepspeed and not layout.weights) else 0
            each["optimizer"] = (moments + masters) / (processes if layout.moments else 1)
            kept = not rollout or layout.name == "ZeRO-3"  # ZeRO-3 never frees them
            gradient = b if layout.deepspeed else max(b, 4)  # summed in float32
            each["gradients"] = kept * gradient / (processes if layout.gradients else 1)
        for name, size in each.items():
            total[name] = total.get(name, 0.0) + size * parameter.numel()
    return total


def copy_bytes(
    args: PolicyGradientConfig,
    policy: Policy,
    moves: bool,
    layout: Sharding,
    processes: int,
) -> float:
    """Return the bytes on one process that a frozen copy does not share with the policy."""
    parameters = list(policy.parameters())
    fresh = args.use_peft and not moves  # an adapter that adds nothing yet
    copied = 0 if fresh else sum(p.nbytes for p in parameters if p.requires_grad)
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    if layout.weights:
        return (copied + frozen) / processes
    return float(copied)


def engine_bytes(args: PolicyGradientConfig, total: float) -> float:
    """Return how many of a GPU's `total` bytes an in-process vLLM keeps during updates."""
    if args.rollout_engine != "vllm":
        return 0.0
    if args.vllm_enable_sleep_mode:
        return ASLEEP
    return vllm_share(args, 0.0) * total


def vllm_share(args: PolicyGradientConfig, free: float) -> float:
    """Return the share of a GPU that vLLM takes, if `free` of it is left between updates."""
    if args.vllm_gpu_memory_utilization != "auto":
        return args.vllm_gpu_memory_utilization
    if args.vllm_enable_sleep_mode:
        return SHARE["cuda"] * free
    return AWAKE


def free_share(backend: DDPBackend | None, optim: str, runtime: Runtime) -> float:
    """Return the share of the device that is free between updates, when there are moments."""
    if runtime.device.type != "cuda":
        return 1.0
    torch.cuda.empty_cache()
    memory = torch.cuda.mem_get_info(runtime.device)
    free, total = map(float, memory)
    if backend is not None:
        for updated in backend.updated():
            shard = updated.to_local() if isinstance(updated, DTensor) else updated
            if shard.is_cuda and updated not in backend.optimizer.state:
                number = 1 if optim == "adamw_8bit" else shard.element_size()
                free -= 2 * number * shard.numel()
    return max(free / total, LEAST_SHARE)


def _room(
    args: PolicyGradientConfig,
    module: nn.Module,
    runtime: Runtime,
    teacher: nn.Module | None,
) -> float:
    """Return the bytes that a micro-batch may take on this process."""
    if runtime.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return SHARE["cpu"] * memory / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, total = torch.cuda.mem_get_info(runtime.device)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    engine = engine_bytes(args, total)
    # Memory that training has not allocated yet but will keep.
    layout = next(layout for layout in SHARDINGS if layout.name == runtime.kind)
    due = memory_by_part(module.parameters(), layout, runtime.world, optim=args.optim)
    if not runtime.splits:
        del due["weights"]  # they are on the device already
    left = free + unused - engine - sum(due.values())
    if args.beta > 0:
        moves = args.sync_ref_model
        left -= copy_bytes(args, _policy_of(module), moves, layout, runtime.world)
    if teacher is not None and runtime.splits:  # its share comes later
        left -= sum(p.nbytes for p in teacher.parameters()) / runtime.world
    return SHARE["cuda"] * left


# ---------------------------------------------------------------- what a micro-batch takes


class Growth(NamedTuple):
    """The peak memory of a micro-batch in bytes, and its growth with each more token."""

    tokens: float
    bytes: float
    each: float

    def at(self, tokens: float) -> float:
        """Return the bytes for this many tokens."""
        return self.bytes + (tokens - self.tokens) * self.each

    def tokens_within(self, room: float) -> int:
        """Return the tokens of the largest micro-batch that takes at most `room` bytes."""
        return int(self.tokens + (room - self.bytes) / self.each)


def of_update(
    module: nn.Module,
    args: PolicyGradientConfig,
    longest_prompt: int,
    device: torch.device,
    kind: str | None = None,
) -> Growth:
    """Measure how the memory of an update's micro-batches grows: with one group of the longest
    rows, and with as many as a micro-batch holds (at most `MOST_GROUPS`, to save time). The peak is
    that of the largest of several stages, each of which grows with the tokens, so between the two
    sizes it is at most the returned line.

    The module is measured on `device`, which may differ from the `kind` of device of the run.
    """
    kind = kind or device.type
    rows = args.num_generations
    prompt = longest_prompt
    completion = args.max_completion_length
    measured = blueprint(module, device, kind)
    packs = can_pack(probe(1, rows, prompt, completion), _policy_of(module).window)
    tokens = rows * completion + prompt * (1 if packs else rows)
    budget = args.micro_batch_tokens
    largest = most(kind, prompt + completion) if budget == "auto" else int(budget)
    groups = max(2, min(MOST_GROUPS, largest // tokens))
    first = footprint(measured, probe(1, rows, prompt, completion, device))
    last = footprint(measured, probe(groups, rows, prompt, completion, device))
    return Growth(tokens, first, (last - first) / (tokens * (groups - 1)))


def _policy_of(module: nn.Module) -> Policy:
    return next(part for part in module.modules() if isinstance(part, Policy))


def footprint(module: nn.Module, batch: Batch) -> int:
    """Return the peak bytes of a pass forward and back, without weights and gradients."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with _Meter(module) as meter, measurable_experts():
        numbers = module.train()(batch)
        losses = [x.sum() for x in numbers if x is not None and x.requires_grad]
        torch.autograd.backward(torch.stack(losses).sum())
    return int(meter.peak)


def probe(
    groups: int,
    rows: int,
    prompt: int,
    completion: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """Make groups of `rows` rows each, with prompts and completions of the given lengths."""
    ids = [0] * completion
    logprobs = [0.0] * completion
    made = []
    for group in range(groups):
        row = Row(prompt_ids=[0] * prompt, ids=ids, logprobs=logprobs, group=group)
        made += [row] * rows
    return Batch.of(made, device)


def blueprint(module: nn.Module, device: torch.device | str, kind: str | None = None) -> nn.Module:
    """Copy a module with fake tensors, which have a device and shapes but no data, to measure a
    `kind` of device, by default the same.
    """
    fake = MeasuringMode(allow_non_fake_inputs=True)  # masks and lengths stay real: they are read
    fake.kind = kind or torch.device(device).type

    def empty(like: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    meta: dict[int, Any] = {id(buffer): empty(buffer) for buffer in module.buffers()}
    meta |= {id(p): nn.Parameter(empty(p), p.requires_grad) for p in module.parameters()}
    copied = copy.deepcopy(module, meta)
    for part in copied.modules():
        if checkpoints(part):
            checkpoint_activations(part, offloads(part))  # its hook is bound to what was copied
    return copied


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that were made inside it and are alive, on one device."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._kind = next(module.parameters()).device.type
        tensors: list[Tensor] = [*module.buffers()]
        for parameter in module.parameters():
            tensors.append(parameter)
            if parameter.grad is not None:
                tensors.append(parameter.grad)
        self._known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self._kind:
                storage = tensor.untyped_storage()  # a view has no memory of its own
                key = storage._cdata
                bytes_ = storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.alive += bytes_
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._forget, key, bytes_).atexit = False
        return out

    def _forget(self, key: int, bytes_: int) -> None:
        self._known.discard(key)
        self.alive -= bytes_
