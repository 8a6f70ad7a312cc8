"""The backend for one process or DDP, and the full weights of modules that other backends shard.

Under FSDP2 a parameter is a `DTensor`; under ZeRO-3 it is empty and has a `ds_id`; otherwise it is
whole. A "collective" function has to be called by every process, in the same order.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import swap_tensors

from rlhf_pg.models.adapters import Gather
from rlhf_pg.runtime.termination import Watch, waits

M = TypeVar("M", bound=nn.Module)
State = tuple[Tensor, str, Tensor]  # parameter, key, value in the optimizer's state
COUNTER = "step"  # the key whose value does not have the parameter's shape
TABLES = (
    "qmap1",
    "qmap2",
)  # keys of the code tables of bitsandbytes' 8-bit moments
MASTER = "master"  # key of the float32 master weights of bfloat16 weights
HAS_MOMENTS = (
    "optimizers: yours has moments already, which bfloat16, FSDP and DeepSpeed would lose: give a "
    "new optimizer"
)


def check_divisible(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse weights and moments that FSDP and DeepSpeed cannot shard (ValueError)."""
    if not all(p.is_floating_point() for p in module.parameters()):
        raise ValueError("4-bit weights are for one process or DDP: launch without FSDP, DeepSpeed")
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:  # bitsandbytes
        raise ValueError(
            "8-bit moments are for one process or DDP: launch without FSDP, DeepSpeed, or set "
            "optim to adamw_torch_fused"
        )
    if optimizer.state:
        raise ValueError(HAS_MOMENTS)


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a possibly sharded tensor, detached; collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if hasattr(tensor, "ds_id"):
        with gathered(tensor):
            return tensor.detach().clone()
    return tensor.detach()


def gathered(*parameters: Tensor, write: bool = False) -> AbstractContextManager[Any]:
    """Gather ZeRO-3 parameters; with `write` keep the main process's values; collective."""
    split = [p for p in parameters if hasattr(p, "ds_id")]
    if not split:
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters(split, 0 if write else None)  # type: ignore[no-any-return]


def put(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a value that is on every process; collective."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shards = distribute_tensor(
            value.to(mesh.device_type),
            mesh,
            parameter.placements,
            src_data_rank=None,  # no sending
        )
        parameter.to_local().detach().copy_(shards.to_local())
        return
    with gathered(parameter, write=True):
        parameter.detach().copy_(value)


class MasterWeights:
    """Updates float32 master weights, and rounds them into the model's bfloat16 weights.

    The 8 bits of bfloat16 would lose changes below 0.2 %, of weights and of gradients that are
    summed over micro-batches: each weight's gradient moves to its master as soon as it is computed.
    Weights in other dtypes are updated directly. The optimizer's parameter groups then hold the
    masters; ValueError if it already has moments of the replaced weights.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._of: dict[Tensor, Tensor] = {}
        for parameter in trained:
            if parameter.dtype == torch.bfloat16:
                self._of[parameter] = nn.Parameter(parameter.detach().float())
        self._weights = {master: weight for weight, master in self._of.items()}
        for group in optimizer.param_groups:
            group["params"] = [self.of(p) for p in group["params"]]
        if optimizer.state.keys() - {self.of(p) for p in trained}:
            raise ValueError(HAS_MOMENTS)

    def of(self, weight: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a weight: its master or itself."""
        return self._of.get(weight, weight)

    def weight(self, updated: Tensor) -> Tensor:
        """Return the weight of an updated tensor, the inverse of `of`."""
        return self._weights.get(updated, updated)

    @contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Move gradients to the masters as they are computed in the block."""
        handles = []
        for weight in self._of:
            hook: Any = weight.register_post_accumulate_grad_hook
            handles.append(hook(self._take_gradient))
        try:
            yield
        finally:  # the model may be trained further by another trainer
            for handle in handles:
                handle.remove()

    def _take_gradient(self, weight: Tensor) -> None:
        """Add a weight's gradient to its master's."""
        master = self._of[weight]
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update tensors with a gradient, and round the masters into the weights."""
        self.optimizer.step()
        for weight, master in self._of.items():
            if master.grad is not None:
                weight.copy_(master)

    def state(self) -> Iterator[State]:
        """Yield all trained weights in float32, even float32 ones, for DeepSpeed."""
        for group in self.optimizer.param_groups if self._of else ():
            for updated in group["params"]:
                yield self.weight(updated), MASTER, full(updated)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights into the masters after loading."""
        for weight, master in self._of.items():
            master.copy_(weight)


class DDPBackend:
    """The trained module on its device, with its optimizer, and the operations of an update.

    `self.optimizer` has the learning rates. A `max_grad_norm` of 0 does not clip.
    """

    watch: Watch | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Optimizer,
        max_grad_norm: float = 0.0,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self._accelerator = accelerator
        self._world = accelerator.num_processes
        self._wrapped: Any = self._wrap()
        self._masters = MasterWeights(self.optimizer)

    def _wrap(self) -> Any:
        # Without torch's DDP, whose buckets sum in the dtype of the weights.
        module: Any = self._accelerator.prepare_model(self.module, evaluation_mode=True)
        if self._world > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                distributed.broadcast(tensor.detach(), src=0)
        return module

    @staticmethod
    def place(accelerator: Accelerator, module: nn.Module) -> nn.Module:
        """Put a module that is not trained on its device."""
        return module.to(accelerator.device)

    @waits
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the module's output."""
        module = self._wrapped if torch.is_grad_enabled() else self.module
        return module(*inputs, **options)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; gradients are exchanged after the last."""
        yield
        if last and self._world > 1:
            self._sum_gradients()

    @waits
    def _sum_gradients(self) -> None:
        """Sum the gradients of all processes, of parameters that have one on any."""
        updated = [self._masters.of(p) for p in self.module.parameters() if p.requires_grad]
        has_gradient = torch.tensor(
            [parameter.grad is not None for parameter in updated],
            dtype=torch.int32,
            device=self._accelerator.device,
        )
        distributed.all_reduce(has_gradient)
        exchanges = []
        for parameter, count in zip(updated, has_gradient.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                exchanges.append(distributed.all_reduce(parameter.grad, async_op=True))
        for exchange in exchanges:
            exchange.wait()

    @waits
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the loss, of which all shares are the sum."""
        with self._masters.taking_gradients():
            torch.autograd.backward(loss)

    def updated(self) -> Iterable[Tensor]:
        """Yield what the optimizer updates of this process: weights, their masters or shards."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, in at least float32, or this process's shard."""
        return self._masters.of(parameter).grad

    def zero_grad_of(self, module: nn.Module) -> None:
        """Drop the gradient of a module's parameters, so that the next step skips them."""
        for parameter in module.parameters():
            parameter.grad = None
            self._masters.of(parameter).grad = None

    def discard_update(self) -> None:
        """Drop the gradients of an interrupted update."""
        self.zero_grad_of(self.module)

    @waits
    def step(self) -> float:
        """Clip, update and drop the gradient; return its norm before clipping, over all processes.

        A gradient that is not finite leaves the weights unchanged.
        """
        updated = [self._masters.of(p) for p in self.module.parameters()]
        norms = nn.utils.clip_grad_norm_(updated, self.max_grad_norm or torch.inf)
        norm = float(full(norms))
        if math.isfinite(norm):
            self._masters.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> Iterator[State]:
        """Yield the optimizer's state as whole tensors, one by one; collective."""
        for updated, values in self.optimizer.state.items():
            for key, value in values.items():
                value = full(torch.as_tensor(value))
                if key in TABLES:  # all 8-bit moments share them, but a file stores one for each
                    value = value.clone()
                yield self._masters.weight(updated), key, value
        yield from self._masters.state()

    def load_state(self, state: Iterable[State]) -> None:
        """Restore `state` from whole tensors on every process, after the weights."""
        self.optimizer.state.clear()
        self._masters.refresh()
        for weight, key, value in state:
            updated = self._masters.of(weight)
            if key == COUNTER:
                self.optimizer.state[updated][key] = count(self.optimizer, updated, value)
            elif key != MASTER:
                self.optimizer.state[updated][key] = self._like(updated, value)
            elif updated.dtype == torch.float32:
                put(updated, value)

    def _like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Move a moment to the device of its parameter."""
        return value.to(parameter.device)


def count(optimizer: Optimizer, updated: Tensor, value: Tensor) -> Tensor | int:
    """Return the number of updates of a parameter in the optimizer's own format."""
    if not value.is_floating_point():
        return int(value)
    if optimizer.defaults.get("fused"):
        return value.to(updated.device)
    return value


class FullWeights:
    """The full weights of a module, for sampling, saving and loading, which need no shards.

    The constructor is given the module before sharding, if it `splits`; `pieces` is sharded.
    """

    def __init__(self, module: nn.Module, splits: bool, watch: Watch | None = None) -> None:
        self.module = self.pieces = module
        self.watch = watch
        if splits:
            self.module = hollow(module)

    @contextmanager
    def gathered(self, device: torch.device | None, trained: bool = False) -> Iterator[None]:
        """Fill in `module`'s weights, or only `trained` ones, inside the block; collective.

        Without a device this process helps to gather but keeps nothing.
        """
        pairs = self._pairs(trained)
        with self._filled(pairs, device):
            if pairs and device is not None:
                for part in self.module.modules():
                    for name, buffer in part.named_buffers(recurse=False):
                        part._buffers[name] = buffer.to(device)
            yield

    def by_parts(self, device: torch.device) -> Gather:
        """Return what fills in a few of `module`'s weights, inside a block; collective."""
        pieces = dict(self._pairs())

        def gathered(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
            empty = [p for p in parameters if p.is_meta]
            return self._filled([(p, pieces[p]) for p in empty], device)

        return gathered

    @contextmanager
    def _filled(
        self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device | None
    ) -> Iterator[None]:
        try:
            self._fill(pairs, device)
            yield
        finally:
            for parameter, _ in pairs:
                if not parameter.is_meta:
                    put_in_place(parameter, parameter.to("meta"))

    def tensors(self, prefix: str, model: nn.Module) -> tuple[Iterator[tuple[str, Tensor]], int]:
        """Return what `model`, a part of `module`, has in its files, whole tensors that are
        gathered one by one (collective), the widest first; and their number.
        """
        named: list[tuple[str, Tensor]] = []
        for name, piece in self.pieces.named_parameters():
            if name.startswith(prefix):
                named.append((name.removeprefix(prefix), piece))
        saved = model.state_dict().keys()
        named += [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        named.sort(key=lambda pair: -pair[1].itemsize)
        return ((name, full(x)) for name, x in named), len(named)

    @contextmanager
    def modify(self, trained: bool = False) -> Iterator[None]:
        """Write changes of `module` in the block, on the CPU, back to the shards; collective."""
        with self.gathered(torch.device("cpu"), trained):
            yield
            self._spread(trained)

    @waits
    def _spread(self, trained: bool) -> None:
        for parameter, piece in self._pairs(trained):
            put(piece, parameter)

    @waits
    def _fill(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device | None) -> None:
        for parameter, piece in pairs:
            value = full(piece)  # one by one: saves memory where none is kept
            if device is not None:
                put_in_place(parameter, value.to(device))

    def _pairs(self, trained: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of whole and sharded parameters of `module`, tied ones once."""
        if self.module is self.pieces:
            return []
        pieces = dict(self.pieces.named_parameters())
        return [
            (parameter, pieces[name])
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad or not trained
        ]


def hollow(module: M) -> M:
    """Copy a module without memory for its parameters; its buffers are whole."""
    empty: dict[int, Any] = {}
    for parameter in module.parameters():
        meta = parameter.detach().to("meta")
        empty[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    return copy.deepcopy(module, empty)


def put_in_place(parameter: Tensor, value: Tensor) -> None:
    """Replace a parameter by another tensor wherever it is used."""
    swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))  # type: ignore[no-untyped-call]
