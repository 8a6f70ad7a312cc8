"""The FSDP2 backend: every process has a shard of weights, gradients and moments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rlhf_pg.models.streaming import stored_value
from rlhf_pg.runtime.ddp import DDPBackend, check_divisible, put


class FSDPBackend(DDPBackend):
    """Gathers weights layer by layer, and reduces gradients to shards at every micro-batch, so that
    no process ever holds the whole gradient.
    """

    def _wrap(self) -> Any:
        check_divisible(self.module, self.optimizer)
        _set_apart(self.module)
        before = {id(p): name for name, p in self.module.named_parameters()}
        wrapped = _shard(self._accelerator, self.module)
        after = dict(self.module.named_parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [after[before[id(p)]] for p in group["params"]]
        return wrapped

    @staticmethod
    def place(accelerator: Accelerator, module: nn.Module) -> nn.Module:
        """Shard a module that is not trained, even parts that the launcher keeps whole."""
        # Without a backward pass, gathered weights would never be freed.
        sharded = _shard(accelerator, module)
        sharded.set_reshard_after_forward(True)
        return module

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the module's output; a pass without gradients keeps no layer whole."""
        output = super().__call__(*inputs, **options)
        if not torch.is_grad_enabled():
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        return output

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self._world)  # FSDP2 averages

    def _like(self, parameter: Tensor, value: Tensor) -> Tensor:
        # Like the optimizer: `DTensor.from_local` would move an offloaded moment to the GPU.
        moment = torch.empty_like(parameter, dtype=value.dtype)
        put(moment, value)
        return moment


def _shard(accelerator: Accelerator, module: nn.Module) -> Any:
    """Shard a module in place, by the layers that `transformers` does not split, and the rest."""
    names = set[str]()
    kinds = set[str]()
    for part in module.modules():
        names.update(getattr(part, "_no_split_modules", None) or ())
        kinds.add(type(part).__name__)
    module._no_split_modules = sorted(names & kinds)  # type: ignore[assignment]
    empty = [name for name, p in module.named_parameters() if p.is_meta]
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.auto_wrap_policy
    layers = plugin.transformer_cls_names_to_wrap
    widest = torch.float32
    for parameter in module.parameters():
        widest = torch.promote_types(widest, parameter.dtype)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=widest)
    # `Accelerator.prepare` takes only one model, and only with its optimizer.
    sharded: Any = fsdp2_prepare_model(accelerator, module)
    # The plugin now has this module's layers; restore it for the next module.
    plugin.auto_wrap_policy = policy
    plugin.transformer_cls_names_to_wrap = layers
    # By default the outermost weights stay gathered after a pass without gradients, and changes to
    # them would be lost.
    sharded.set_reshard_after_forward(True, recurse=False)
    if empty:
        device = accelerator.device
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            device = torch.device("cpu")
        _fill(module, empty, device)
    return sharded


@torch.no_grad()
def _fill(module: nn.Module, empty: Sequence[str], device: torch.device) -> None:
    """Give memory to the shards of these parameters, and read their values tensor by tensor."""

    def local(x: Any) -> Any:
        if isinstance(x, DTensor):
            return x.to_local()
        return x

    buffers = dict(module.named_buffers())
    kept = {}
    for name, x in module.named_parameters():
        if name not in empty:
            kept[name] = local(x).clone()
    module.to_empty(device=device)  # the others too
    for name, x in module.named_parameters():
        if name in kept:
            local(x).copy_(kept[name])
        else:
            put(x, stored_value(module, name))
    for name, buffer in buffers.items():
        part, _, leaf = name.rpartition(".")
        owner = module.get_submodule(part)
        owner._buffers[leaf] = buffer


def _set_apart(module: nn.Module) -> None:
    """Give each child its own copy of frozen weights that it shares with an earlier one.

    FSDP2 allows a weight in one place only. (Weights tied within a child stay tied.)
    """
    taken: set[int] = set()
    for child in module.children():
        copies = {
            id(p): nn.Parameter(p.detach().clone(), requires_grad=False)
            for p in child.parameters()
            if id(p) in taken
        }
        for part in child.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if id(parameter) in copies:
                    setattr(part, name, copies[id(parameter)])
        taken.update(map(id, child.parameters()))
