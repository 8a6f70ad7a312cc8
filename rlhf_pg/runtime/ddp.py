"""A module and its optimizer, of which every process has all: one process, or DDP."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_pg.runtime.bf16_updates import (
    MASTER,
    ROUNDINGS,
    MasterWeights,
    Nearest,
    StochasticRounding,
)
from rlhf_pg.runtime.full_weights import full
from rlhf_pg.runtime.watchdog import Watch, waits

State = tuple[Tensor, str, Tensor]  # parameter, key, what the optimizer remembers of it
COUNTER = "step"  # the key that is no tensor like the parameter
TABLES = ("qmap1", "qmap2")  # the keys of what the 8 bits of bitsandbytes stand for
OUTSIDE = (MASTER, ROUNDINGS)  # the keys of what no optimizer remembers


class DDPBackend:
    """What is trained, and the verbs of training. Others override what they do differently.

    Args:
        module: on its device and wrapped here, once.
        optimizer: of its parameters; `self.optimizer` has the learning rates from here on.
        max_grad_norm: 0 leaves the gradient as it is.
        bfloat16_update: how an update reaches weights in bfloat16, as the config has it.
        seed: of stochastic rounding.
    """

    watch: Watch | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Optimizer,
        max_grad_norm: float = 0.0,
        bfloat16_update: str = "master_weights",
        seed: int = 0,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.max_grad_norm = max_grad_norm
        self._accelerator = accelerator
        self._world = accelerator.num_processes
        self._wrapped: Any = self._wrap()
        self._updates = self._new_updates(bfloat16_update, seed)

    def _wrap(self) -> Any:
        wrapped: nn.Module = self._accelerator.prepare_model(self.module)
        return wrapped

    def _new_updates(self, bfloat16_update: str, seed: int) -> Nearest:
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        if bfloat16_update != "master_weights" and all(p.dtype != torch.bfloat16 for p in trained):
            raise ValueError(
                f"bfloat16_update {bfloat16_update} has no effect: no trained weight is in "
                "bfloat16, as those of adapters never are; leave it out"
            )
        if bfloat16_update == "stochastic_rounding":
            return StochasticRounding(self.optimizer, seed)
        return (MasterWeights if bfloat16_update == "master_weights" else Nearest)(self.optimizer)

    @staticmethod
    def place(accelerator: Accelerator, module: nn.Module) -> nn.Module:
        """A module that is not trained, where it belongs."""
        return module.to(accelerator.device)

    @waits
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The module's output."""
        called = self._wrapped if torch.is_grad_enabled() else self.module
        return called(*inputs, **options)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are exchanged on the last."""
        if last:
            return nullcontext()
        hold_back: AbstractContextManager[Any] = self._accelerator.no_sync(self._wrapped)
        return hold_back

    @waits
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the loss.

        The shares of all processes sum to the loss, while the gradient that is exchanged is a mean:
        multiplying by the number of processes undoes that, here and nowhere else.
        """
        torch.autograd.backward(loss * self._world)

    def zero_grad_of(self, module: nn.Module) -> None:
        """Drop the gradient of some of the parameters, which the next step then leaves alone."""
        for parameter in module.parameters():
            parameter.grad = None

    def discard_update(self) -> None:
        """Drop what is left of an update that was broken off."""
        self.zero_grad_of(self.module)

    @waits
    def step(self) -> float:
        """Clip, update, and drop the gradient; returns its norm before that, of all processes.

        With a gradient that is not finite the weights stay as they were.
        """
        self._updates.take_gradients()
        updated = [self._updates.of(p) for p in self.module.parameters()]
        norm = float(full(nn.utils.clip_grad_norm_(updated, self.max_grad_norm or torch.inf)))
        if math.isfinite(norm):
            self._updates.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> Iterator[State]:
        """What the optimizer remembers, tensor by tensor and each of them whole; collective."""
        for updated, values in self.optimizer.state.items():
            for key, value in values.items():
                whole = full(torch.as_tensor(value))
                # 8-bit moments of all parameters share their tables; a file has each of them.
                yield self._updates.weight(updated), key, whole.clone() if key in TABLES else whole
        yield from self._updates.state()

    def load_state(self, state: Iterable[State]) -> None:
        """The inverse of `state`; whole tensors that every process has. After loading weights."""
        self.optimizer.state.clear()
        self._updates.refresh()
        for weight, key, value in state:
            if key in OUTSIDE:
                self._updates.load(weight, key, value)
                continue
            updated = self._updates.of(weight)
            is_count = key == COUNTER
            own = count(self.optimizer, updated, value) if is_count else self._like(updated, value)
            self.optimizer.state[updated][key] = own

    def _like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """A moment where its parameter is."""
        return value.to(parameter.device)


def count(optimizer: Optimizer, updated: Tensor, value: Tensor) -> Tensor | int:
    """The number of updates of a parameter, as the optimizer keeps it."""
    if not value.is_floating_point():
        return int(value)
    return value.to(updated.device) if optimizer.defaults.get("fused") else value
