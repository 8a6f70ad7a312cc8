"""Activation checkpointing and dropout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rlhf_pg.models.attention import configs_of, replace_attention
from rlhf_pg.models.lm_head import LOADED


def checkpoint_activations(model: nn.Module, offload: bool = False) -> None:
    """Recompute activations in the backward pass; `offload` keeps layer inputs on the host."""
    if not isinstance(model, LOADED):
        return
    configs = configs_of(model)

    def contexts(part: nn.Module) -> tuple[Any, Any]:
        names = [config._attn_implementation for config in configs]  # for the recomputation too
        return _as_forward(part, configs, names), _as_forward(part, configs, names)

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            part._gradient_checkpointing_func = partial(
                _offload if offload else checkpoint,
                use_reentrant=False,
                context_fn=partial(contexts, part),
            )


@contextmanager
def _as_forward(part: nn.Module, configs: list[Any], names: list[str]) -> Iterator[None]:
    """Use the same attention in the forward pass and its recomputation, and give a part the mode of
    its children, since its own only switches recomputation on.
    """
    own = part.training
    part.training = all(child.training for child in part.children())
    try:
        with replace_attention(configs, names):
            yield
    finally:
        part.training = own


def _offload(layer: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Recompute a layer like `checkpoint`, from inputs kept on the host."""
    kept: Any = save_on_cpu(pin_memory=True)
    if any(isinstance(x, FakeTensor) for x in inputs):
        # Fake tensors only measure the device's memory, so they are not kept on the host.
        kept = saved_tensors_hooks(
            lambda x: (x.new_empty(0), x.shape), lambda saved: saved[0].new_empty(saved[1])
        )
    with kept:
        return checkpoint(layer, *inputs, **options)


def checkpoints(model: nn.Module) -> bool:
    """Return whether any part of the model recomputes its activations."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def offloads(model: nn.Module) -> bool:
    """Return whether recomputation starts from inputs in the host's memory."""
    functions = (getattr(part, "_gradient_checkpointing_func", None) for part in model.modules())
    return any(getattr(function, "func", None) is _offload for function in functions)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and in rates that attention functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
