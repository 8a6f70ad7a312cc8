"""The FSDP2 backend: every process has a shard of weights, gradients and moments."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
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
        _shard(accelerator, module).set_reshard_after_forward(True)
        return module

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the module's output; a pass without gradients keeps no layer whole."""
        output = super().__call__(*inputs, **options)
        for part in () if torch.is_grad_enabled() else self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return output

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def _like(self, parameter: Tensor, value: Tensor) -> Tensor:
        # Like the optimizer: `DTensor.from_local` would move an offloaded moment to the GPU.
        moment = torch.empty_like(parameter, dtype=value.dtype)
        put(moment, value)
        return moment


def _shard(accelerator: Accelerator, module: nn.Module) -> Any:
    """Shard a module in place, by the layers that `transformers` does not split, and the rest."""
    parts = list(module.modules())
    names = {name for part in parts for name in getattr(part, "_no_split_modules", None) or ()}
    there = {type(part).__name__ for part in parts}
    module._no_split_modules = sorted(names & there)  # type: ignore[assignment]
    empty = [name for name, p in module.named_parameters() if p.is_meta]
    plugin = accelerator.state.fsdp_plugin
    wanted = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
    # `Accelerator.prepare` takes only one model, and only with its optimizer.
    sharded: Any = fsdp2_prepare_model(accelerator, module)
    # The plugin now has this module's layers; restore it for the next module.
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = wanted
    # By default the outermost weights stay gathered after a pass without gradients, and changes to
    # them would be lost.
    sharded.set_reshard_after_forward(True, recurse=False)
    if empty:
        offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        _fill(module, empty, torch.device("cpu") if offloads else accelerator.device)
    return sharded


@torch.no_grad()
def _fill(module: nn.Module, empty: Sequence[str], device: torch.device) -> None:
    """Give memory to the shards of these parameters, and read their values tensor by tensor."""

    def local(x: Any) -> Tensor:
        own: Tensor = x.to_local() if isinstance(x, DTensor) else x
        return own

    buffers = dict(module.named_buffers())
    there = {name: local(x).clone() for name, x in module.named_parameters() if name not in empty}
    module.to_empty(device=device)  # the others too
    for name, x in module.named_parameters():
        if name in there:
            local(x).copy_(there[name])
        else:
            put(x, stored_value(module, name))
    for name, buffer in buffers.items():
        part, _, leaf = name.rpartition(".")
        module.get_submodule(part)._buffers[leaf] = buffer


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
        taken |= {id(p) for p in child.parameters()}
