"""A module and its optimizer, of which every process has all: one process, or DDP."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_pg.runtime.failures import Watch, waits
from rlhf_pg.runtime.weights import full, put

State = tuple[Tensor, str, Tensor]  # parameter, key, what the optimizer remembers of it
COUNTER = "step"  # the key that is no tensor like the parameter
MASTER = "master"  # the key of float32 weights that bfloat16 ones are updated through


class Trained:
    """What is trained, and the verbs of training. Others override what they do differently.

    Args:
        module: on its device and wrapped here, once.
        optimizer: of its parameters; `self.optimizer` has the learning rates from here on.
        max_grad_norm: 0 leaves the gradient as it is.
    """

    watch: Watch | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Optimizer,
        max_grad_norm: float = 0.0,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.max_grad_norm = max_grad_norm
        self._accelerator = accelerator
        self._world = accelerator.num_processes
        self._wrapped: Any = self._wrap()

    def _wrap(self) -> Any:
        wrapped: nn.Module = self._accelerator.prepare_model(self.module)
        return wrapped

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

    def forget(self, module: nn.Module) -> None:
        """Drop the gradient of some of the parameters, which the next step then leaves alone."""
        for parameter in module.parameters():
            parameter.grad = None

    @waits
    def step(self) -> float:
        """Clip, update, and drop the gradient; returns its norm before that, of all processes.

        With a gradient that is not finite the weights stay as they were.
        """
        clipped = nn.utils.clip_grad_norm_(
            self.module.parameters(), self.max_grad_norm or torch.inf
        )
        norm = full(clipped)
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def state(self) -> Iterator[State]:
        """What the optimizer remembers, tensor by tensor and each of them whole; collective."""
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                yield parameter, key, full(torch.as_tensor(value))

    def load_state(self, state: Iterable[State]) -> None:
        """The inverse of `state`; whole tensors that every process has. After loading weights."""
        self.optimizer.state.clear()
        for parameter, key, value in state:
            if key != MASTER:
                own = value if key == COUNTER else self._like(parameter, value)
                self.optimizer.state[parameter][key] = own
            elif parameter.dtype == torch.float32:  # it was saved in fewer bits
                put(parameter, value)

    def _like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """A moment where its parameter is."""
        return value.to(parameter.device)
