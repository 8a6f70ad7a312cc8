"""Updates of bfloat16 weights, whose 8 bits lose changes below 0.2 %, in float32 copies."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_pg.runtime.full_weights import full, put

MASTER = "master"  # the key of the float32 weights through which bfloat16 ones are updated


class MasterWeights:
    """Updates of permanent float32 copies, which are then rounded into the model's weights.

    Weights that are not in bfloat16 are updated themselves.

    Args:
        optimizer: its parameter groups hold the copies from now on.

    Raises:
        ValueError: it already has moments.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._of: dict[Tensor, Tensor] = {}  # weight -> its copy
        if any(p.dtype == torch.bfloat16 for p in optimizer.state):
            raise ValueError(
                "optimizers: yours has moments already, of bfloat16 weights: give a new one"
            )
        for group in optimizer.param_groups:
            group["params"] = [self._copied(p) for p in group["params"]]
        self._weights = {master: weight for weight, master in self._of.items()}

    def _copied(self, weight: Tensor) -> Tensor:
        if weight.dtype == torch.bfloat16:
            self._of[weight] = nn.Parameter(weight.detach().float())
        return self.of(weight)

    def of(self, weight: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a weight: its copy or itself."""
        return self._of.get(weight, weight)

    def weight(self, updated: Tensor) -> Tensor:
        """Return the weight that `updated` stands for, the inverse of `of`."""
        return self._weights.get(updated, updated)

    def take_gradients(self) -> None:
        """Move the gradients, in float32, to where the optimizer looks for them."""
        for weight, master in self._of.items():
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update what has a gradient, and round the copies into the weights."""
        self.optimizer.step()
        for weight, master in self._of.items():
            if master.grad is not None:
                weight.copy_(master)

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield all trained weights in float32, even those that the model has in float32.

        DeepSpeed, which may load them, holds the latter in bfloat16.
        """
        for group in self.optimizer.param_groups if self._of else ():
            for updated in group["params"]:
                yield self.weight(updated), MASTER, full(updated)

    def load(self, weight: Tensor, key: str, value: Tensor) -> None:
        """Restore what `state` yielded, here or under another backend; call it after `refresh`."""
        if key == MASTER and self.of(weight).dtype == torch.float32:
            put(self.of(weight), value)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights after they have been loaded."""
        for weight, master in self._of.items():
            master.copy_(weight)
