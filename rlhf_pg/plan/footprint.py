"""Measured footprint of an update beside weights, gradients and optimizer state: it runs the real
forward and backward pass on tensors that have shapes and no data.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.records import Rollout
from rlhf_pg.models.adapters import LOADED, trunk
from rlhf_pg.models.modes import checkpoint_activations, checkpoints, offloads
from rlhf_pg.models.packing import can_pack
from rlhf_pg.models.policy import Policy
from rlhf_pg.plan.sharding import Sharding

logger = logging.getLogger(__name__)


class Footprint(NamedTuple):
    """The footprint of one micro-batch; bytes come on top of weights and their gradients."""

    tokens: float
    layers: float  # bytes alive when the last layer has been forwarded
    forward: float  # bytes alive at the end of the forward pass
    peak: float  # most bytes alive at a time, in the forward or the backward pass
    forward_work: float  # floating-point operations
    work: float  # of forward and backward pass


class Growth(NamedTuple):
    """A footprint that grows with the tokens of a micro-batch: first + (tokens - its) * each."""

    first: Footprint
    each: Footprint  # per token

    def at(self, tokens: float) -> Footprint:
        """Return the footprint of so many tokens."""
        more = tokens - self.first.tokens
        return Footprint(*(a + more * b for a, b in zip(self.first, self.each, strict=True)))

    def tokens_within(self, room: float) -> int:
        """Return the tokens of the largest micro-batch whose peak is within `room` bytes."""
        return int(self.first.tokens + (room - self.first.peak) / self.each.peak)


def growth(module: nn.Module, batch: Callable[[int], Rollout]) -> Growth:
    """Measure how a footprint grows, on batches of one and of two groups, since a part of it does
    not grow.

    Args:
        module: a `Policy`, or one with a critic; it is left as it was.
        batch: makes the module's input of so many groups.
    """
    one, two = (footprint(module, batch(groups)) for groups in (1, 2))
    more = two.tokens - one.tokens
    return Growth(one, Footprint(*((b - a) / more for a, b in zip(one, two, strict=True))))


def footprint(module: nn.Module, batch: Rollout) -> Footprint:
    """Measure the footprint of one micro-batch by running it forward and backward.

    Gradients exist already, as for every micro-batch but the first.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    training = module.training
    policy = next(part for part in module.modules() if isinstance(part, Policy))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    meter = _Meter(module)
    at_trunk: list[int] = []
    hook = trunk(policy.model).register_forward_hook(lambda *_: at_trunk.append(meter.alive))
    try:
        with torch.random.fork_rng(devices), meter:
            numbers = module.train()(batch)
            forward, forward_work = meter.alive, meter.work
            losses = [x.sum() for x in numbers if x is not None and x.requires_grad]
            torch.autograd.backward(torch.stack(losses).sum())
    finally:
        hook.remove()
        module.train(training)
        for parameter in trained:
            parameter.grad = None
    return Footprint(
        tokens(policy, batch), at_trunk[0], forward, meter.peak, forward_work, meter.work
    )


def tokens(policy: Policy, batch: Rollout) -> int:
    """Count the tokens that the policy computes: prompts once and no padding, if it packs."""
    if not can_pack(batch, policy.window):
        return batch.num_rows * batch.width
    completion, prompt = batch.lengths()[:, 0], batch.lengths()[:, 1]
    is_first = batch.shared_prefixes().diff(prepend=torch.full((1,), -1, device=prompt.device)) > 0
    return int(completion.sum() + prompt[is_first].sum())


@torch.no_grad()
def forward_work(module: nn.Module, batch: Rollout) -> int:
    """Count the floating-point operations of scoring a batch."""
    with _Meter(module) as meter:
        module(batch)
    work: int = meter.work
    return work


def probe(
    groups: int, rows: int, prompt: int, completion: int, device: torch.device | str = "cpu"
) -> Rollout:
    """Make groups of `rows` rows each, with prompts and completions of one length."""
    count = groups * rows
    return Rollout.from_tokens(
        prompts=[[0] * prompt] * count,
        completions=[[0] * completion] * count,
        logprobs=[[0.0] * completion] * count,
        truncated=[False] * count,
        groups=[group for group in range(groups) for _ in range(rows)],
        pad_token_id=0,
        device=device,
    )


def blueprint(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Copy a module with tensors that seem to be on a device and hold no memory, so that only
    shapes are computed.

    Integer inputs stay real, since masks and lengths are read.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(tensor: Tensor) -> Tensor:
        return FakeTensor(fake, tensor.detach().to("meta"), torch.device(device))

    meta: dict[int, Any] = {
        id(p): nn.Parameter(empty(p), p.requires_grad) for p in module.parameters()
    }
    meta |= {id(buffer): empty(buffer) for buffer in module.buffers()}
    copied = copy.deepcopy(module, meta)
    for part in copied.modules():
        if isinstance(part, LOADED) and checkpoints(part):
            # Its hook is bound to the model that was copied.
            checkpoint_activations(part, offloads(part))
    return copied


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors."""
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes made inside it and still alive, and floating-point operations.

    It counts storages, not tensors: a view has no memory of its own. Parameters and their gradients
    do not count, nor does what is offloaded to the host.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = self.work = 0
        self._kind = next(module.parameters()).device.type
        kept = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
        self._known = {t.untyped_storage()._cdata for t in [*kept, *module.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = _WORK.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.work += count(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, bytes_ = storage._cdata, storage.nbytes()
        if key in self._known or tensor.device.type != self._kind:
            return
        self._known.add(key)
        self.alive += bytes_
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, bytes_).atexit = False

    def _forget(self, key: int, bytes_: int) -> None:
        self._known.discard(key)
        self.alive -= bytes_


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> int:
    count: Any = flop_counter.sdpa_backward_flop_count
    return int(count(grad.shape, query.shape, key.shape, value.shape))


# Operations of each kernel; torch's own registry covers those of GPUs.
_aten = torch.ops.aten
_WORK: dict[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def of_update(
    module: nn.Module, args: PolicyGradientConfig, longest_prompt: int, device: torch.device
) -> Growth:
    """Measure how the micro-batches of an update grow, in groups of the longest rows."""
    rows = args.num_generations
    try:
        meta = blueprint(module, device)
        return growth(
            meta, lambda n: probe(n, rows, longest_prompt, args.max_completion_length, device)
        )
    except Exception as error:  # a kernel or a value model that reads data
        logger.debug("measured with data, since without it: %s", error)
        short = min(longest_prompt, 16), min(args.max_completion_length, 16)
        return growth(module, lambda n: probe(n, min(rows, 4), *short, device))


def update_options(args: PolicyGradientConfig) -> dict[str, Any]:
    """Return the options that decide how much an update keeps of a weight."""
    return {"bfloat16_update": args.bfloat16_update, "optim": args.optim}


def reference_bytes(
    args: PolicyGradientConfig, policy: Policy, layout: Sharding, processes: int
) -> float:
    """Return the bytes on one process of a reference that it does not share with the policy.

    A fresh adapter (of `use_peft`) adds nothing, so a reference that stays needs none.
    """
    if args.beta == 0:
        return 0.0
    own = list(policy.parameters())
    fresh = args.use_peft and not args.sync_ref_model
    copied = 0 if fresh else size(p for p in own if p.requires_grad)
    if not layout.weights:
        return float(copied)
    return (copied + size(p for p in own if not p.requires_grad)) / processes
