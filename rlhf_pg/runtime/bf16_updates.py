"""Updates of bfloat16 weights, whose 8 bits lose relative changes below 0.2 %."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from rlhf_pg.rng import mix, signed
from rlhf_pg.runtime.full_weights import full, put

MASTER = "master"  # the key of the float32 weights through which bfloat16 ones are updated
ROUNDINGS = "roundings"  # the key of how often a weight has been rounded, which keys its noise
CHUNK = 2**24  # numbers that are rounded at a time, with 30 bytes of memory for each


class Nearest:
    """Updates with gradient, moments and result in the weight's own dtype.

    What rounding loses is lost.

    Args:
        optimizer: of the weights themselves.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._of: dict[Tensor, Tensor] = {}  # weight -> the tensor that the optimizer updates
        self._weights: dict[Tensor, Tensor] = {}  # the inverse

    def of(self, weight: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a weight: a stand-in or itself."""
        return self._of.get(weight, weight)

    def weight(self, updated: Tensor) -> Tensor:
        """Return the weight that `updated` stands for, the inverse of `of`."""
        return self._weights.get(updated, updated)

    def take_gradients(self) -> None:
        """Move the gradients, in float32, to where the optimizer looks for them."""
        for weight, master in self._of.items():
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    def step(self) -> None:
        """Update every weight that has a gradient."""
        self.optimizer.step()

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield what to save besides the optimizer's own state: (weight, key, all of it)."""
        yield from ()

    def load(self, weight: Tensor, key: str, value: Tensor) -> None:
        """Restore what `state` yielded, here or under another backend; call it after `refresh`."""
        if key == MASTER and self.of(weight).dtype == torch.float32:
            put(self.of(weight), value)

    def refresh(self) -> None:
        """Follow the weights after they have been loaded."""


class MasterWeights(Nearest):
    """Updates of permanent float32 copies, which are then rounded into the model's weights.

    Args:
        optimizer: its parameter groups hold the copies from now on.

    Raises:
        ValueError: it already has moments.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        if any(p.dtype == torch.bfloat16 for p in optimizer.state):
            raise ValueError(
                "optimizers: yours has moments already, of bfloat16 weights: give a new one, or "
                "set bfloat16_update to nearest"
            )
        for group in optimizer.param_groups:
            group["params"] = [self._copied(p) for p in group["params"]]
        self._weights = {master: weight for weight, master in self._of.items()}

    def _copied(self, weight: Tensor) -> Tensor:
        if weight.dtype == torch.bfloat16:
            self._of[weight] = nn.Parameter(weight.detach().float())
        return self.of(weight)

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies that have a gradient, and round them into the weights."""
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

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights after they have been loaded."""
        for weight, master in self._of.items():
            master.copy_(weight)


class StochasticRounding(MasterWeights):
    """Updates through temporary float32 copies, one tensor after the other, rounded at random.

    The new weight is one of the two neighbours in bfloat16, more often the nearer one, so that its
    mean is exact.

    Args:
        seed: of the noise, a pure function of (seed, weight, number of its updates, position):
            every process rounds alike, and a shard like the whole.
    """

    def __init__(self, optimizer: Optimizer, seed: int) -> None:
        super().__init__(optimizer)
        self._seed = seed
        self._roundings = dict.fromkeys(self._of, 0)
        for master in self._of.values():
            _empty(master)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        gradients = [master.grad for master in self._of.values()]
        for master in self._of.values():
            master.grad = None
        self.optimizer.step()  # of the weights that are in float32 anyway
        self.optimizer.zero_grad()
        for number, weight in enumerate(self._of):
            gradient, gradients[number] = gradients[number], None
            if gradient is not None:
                self._update(number, weight, gradient)

    def _update(self, number: int, weight: Tensor, gradient: Tensor) -> None:
        """Update one weight, while no other parameter has a gradient."""
        master, own = self._of[weight], _own(self._of[weight])
        own.untyped_storage().resize_(own.numel() * own.element_size())
        own.copy_(_own(weight))
        master.grad = gradient
        self.optimizer.step()
        master.grad = None
        self._roundings[weight] += 1
        key = mix(mix(mix(torch.tensor(signed(self._seed))) + number) + self._roundings[weight])
        round_stochastically(own, _own(weight), key, _offset(weight))
        _empty(master)

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield how often each weight has been rounded."""
        for weight, count in self._roundings.items():
            yield weight, ROUNDINGS, torch.tensor(count)

    def load(self, weight: Tensor, key: str, value: Tensor) -> None:
        """Restore what `state` yielded; call it after `refresh`."""
        if key == ROUNDINGS:
            self._roundings[weight] = int(value)

    def refresh(self) -> None:
        """Reset the counts of roundings."""
        self._roundings = dict.fromkeys(self._of, 0)


def round_stochastically(x: Tensor, out: Tensor, key: Tensor, offset: int = 0) -> None:
    """Round float32 to bfloat16, up or down with a probability given by the distance.

    The low 16 bits, which bfloat16 lacks, are the distance from the neighbour towards 0: a uniform
    number of 16 bits is added to them, and they are cut off. Non-finite numbers stay as they are.

    Args:
        x: contiguous float32.
        out: contiguous bfloat16 of the same shape, written to.
        key: () int64, of the noise.
        offset: position of the first number of `x` in the whole tensor, if `x` is a shard.
    """
    for start in range(0, x.numel(), CHUNK):
        part = x.view(-1)[start : start + CHUNK]
        first = offset + start
        noise = mix(key + torch.arange(first, first + len(part), device=x.device)) & 0xFFFF
        bits = (part.view(torch.int32) + noise.int()) & ~0xFFFF
        rounded = torch.where(part.isfinite(), bits.view(torch.float32), part)
        out.view(-1)[start : start + CHUNK] = rounded


def _own(tensor: Any) -> Tensor:
    """Return this process's shard of a tensor, or all of an unsharded one."""
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()


def _empty(master: Tensor) -> None:
    """Free the memory of a tensor, but keep its shape."""
    _own(master).untyped_storage().resize_(0)


def _offset(weight: Tensor) -> int:
    """Return the position of this process's shard in the whole weight, counted in numbers."""
    if not isinstance(weight, DTensor):
        return 0
    _, first = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return sum(i * stride for i, stride in zip(first, weight.stride(), strict=True))
