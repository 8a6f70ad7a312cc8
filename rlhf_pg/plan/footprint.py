"""Measured footprint of an update beside weights, gradients and optimizer state: it runs the real
forward and backward pass on tensors that have shapes and no data.
"""

import copy
import logging
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.models.adapters import LOADED
from rlhf_pg.models.modes import checkpoint_activations, checkpoints, offloads
from rlhf_pg.models.packing import can_pack
from rlhf_pg.models.policy import Policy

logger = logging.getLogger(__name__)


class Growth(NamedTuple):
    """The most bytes that are alive in a micro-batch, and their growth with each more token."""

    tokens: float
    bytes: float
    each: float

    def at(self, tokens: float) -> float:
        """Return the bytes of so many tokens."""
        return self.bytes + (tokens - self.tokens) * self.each

    def tokens_within(self, room: float) -> int:
        """Return the tokens of the largest micro-batch that takes at most `room` bytes."""
        return int(self.tokens + (room - self.bytes) / self.each)


def of_update(
    module: nn.Module, args: PolicyGradientConfig, longest_prompt: int, device: torch.device
) -> Growth:
    """Measure how the micro-batches of an update grow: one and two groups of the longest rows."""
    rows, prompt, completion = args.num_generations, longest_prompt, args.max_completion_length
    try:
        measured = blueprint(module, device)
        one, two = (footprint(measured, probe(n, rows, prompt, completion, device)) for n in (1, 2))
    except Exception as error:  # a kernel or a value model that reads data
        logger.debug("measured with data, since without it: %s", error)
        rows, prompt, completion = min(rows, 4), min(prompt, 16), min(completion, 16)
        one, two = (footprint(module, probe(n, rows, prompt, completion, device)) for n in (1, 2))
    policy = next(part for part in module.modules() if isinstance(part, Policy))
    packs = can_pack(probe(1, rows, prompt, completion), policy.window)
    tokens = rows * completion + prompt * (1 if packs else rows)
    return Growth(tokens, one, (two - one) / tokens)


def footprint(module: nn.Module, batch: Batch) -> int:
    """Return the most bytes alive at a time in the forward or backward pass of one micro-batch.

    Weights and their gradients, which exist already, do not count. The module, a `Policy` or one
    with a critic, is left as it was.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    training = module.training
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), _Meter(module) as meter:
            numbers = module.train()(batch)
            losses = [x.sum() for x in numbers if x is not None and x.requires_grad]
            torch.autograd.backward(torch.stack(losses).sum())
    finally:
        module.train(training)
        for parameter in trained:
            parameter.grad = None
    return int(meter.peak)


def probe(
    groups: int, rows: int, prompt: int, completion: int, device: torch.device | str = "cpu"
) -> Batch:
    """Make groups of `rows` rows each, with prompts and completions of one length."""
    count = groups * rows
    return Batch.from_tokens(
        prompts=[[0] * prompt] * count,
        completions=[[0] * completion] * count,
        logprobs=[[0.0] * completion] * count,
        truncated=[False] * count,
        groups=[group for group in range(groups) for _ in range(rows)],
        pad_token_id=0,
        device=device,
    )


def blueprint(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Copy a module with tensors that seem to be on a device, of which only shapes are computed."""
    # Integer inputs stay real, since masks and lengths are read.
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
            checkpoint_activations(part, offloads(part))  # its hook is bound to what was copied
    return copied


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes made inside it and still alive: of storages, since a view has no
    memory of its own. What is offloaded to the host does not count.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._kind = next(module.parameters()).device.type
        kept = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
        self._known = {t.untyped_storage()._cdata for t in [*kept, *module.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self._kind:
                storage = tensor.untyped_storage()
                key, bytes_ = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.alive += bytes_
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._forget, key, bytes_).atexit = False
        return out

    def _forget(self, key: int, bytes_: int) -> None:
        self._known.discard(key)
        self.alive -= bytes_
