"""Weights that are sharded over several processes: gathering them, and sharding them again.

Under FSDP2 a parameter is a `DTensor`; under ZeRO-3 it is empty and has a `ds_id`; any other is
whole. "Collective" means that every process has to call the function, in the same order.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import swap_tensors

from rlhf_pg.runtime.termination import Watch, waits

CPU = torch.device("cpu")


def check_divisible(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse (ValueError) what FSDP and DeepSpeed cannot shard."""
    if not all(p.is_floating_point() for p in module.parameters()):
        raise ValueError("4-bit weights are for one process or DDP: launch without FSDP, DeepSpeed")
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:  # of bitsandbytes
        raise ValueError(
            "8-bit moments are for one process or DDP: launch without FSDP, DeepSpeed, or set "
            "optim to adamw_torch_fused"
        )


def full(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded, detached; collective."""
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

    context: AbstractContextManager[Any] = zero.GatheredParameters(split, 0 if write else None)
    return context


def put(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a value that every process has; collective."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        value = value.to(mesh.device_type)
        # Every process has the value: none has to send it.
        own = distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().detach().copy_(own.to_local())
        return
    with gathered(parameter, write=True):
        parameter.detach().copy_(value)


class FullWeights:
    """The full weights of a module, for what cannot work with shards: sampling, saving, loading.

    The module is given before it is sharded, if it is to be (`splits`); `pieces` is sharded.
    """

    def __init__(self, module: nn.Module, splits: bool, watch: Watch | None = None) -> None:
        self.module = self.pieces = module
        self.watch = watch
        if splits:  # a copy whose parameters have a shape but no memory; its buffers are whole
            empty: dict[int, Any] = {
                id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad)
                for p in module.parameters()
            }
            self.module = copy.deepcopy(module, empty)
        self._users = 0

    @contextmanager
    def gathered(self, device: torch.device | None, trained: bool = False) -> Iterator[None]:
        """Give `module` its weights, or those `trained`, inside the block only; collective.

        Without a device this process helps to gather and keeps nothing. Within another such block
        for the same module it changes nothing.
        """
        self._users += 1
        try:
            if self._users == 1:
                self._fill(device, trained)
            yield
        finally:
            self._users -= 1
            if not self._users:
                for own, _ in self._pairs():
                    if not own.is_meta:
                        _put_in_place(own, own.to("meta"))

    @contextmanager
    def modified(self, trained: bool = False) -> Iterator[None]:
        """Write what every process changes in `module`, on the CPU, to the shards; collective."""
        with self.gathered(CPU, trained):
            yield
            self._spread(trained)

    @waits
    def _spread(self, trained: bool) -> None:
        for own, piece in self._pairs(trained):
            put(piece, own)

    @waits
    def _fill(self, device: torch.device | None, trained: bool) -> None:
        pairs = self._pairs(trained)
        for own, piece in pairs:
            value = full(piece)  # one at a time, so a process that keeps none needs little memory
            if device is not None:
                _put_in_place(own, value.to(device))
        if pairs and device is not None:
            for part in self.module.modules():
                for name, buffer in part.named_buffers(recurse=False):
                    part._buffers[name] = buffer.to(device)

    def _pairs(self, trained: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of `module` with their sharded ones, tied ones once."""
        if self.module is self.pieces:
            return []
        pieces = dict(self.pieces.named_parameters())
        return [
            (own, pieces[name])
            for name, own in self.module.named_parameters()
            if own.requires_grad or not trained
        ]


def _put_in_place(parameter: Tensor, value: Tensor) -> None:
    """Replace a parameter by another tensor wherever it is used."""
    swap: Any = swap_tensors
    swap(parameter, nn.Parameter(value, parameter.requires_grad))
