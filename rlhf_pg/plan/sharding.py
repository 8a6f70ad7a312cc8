"""The bytes that each process keeps of a model, for every way of sharding it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Sharding(NamedTuple):
    """A way of sharding: what is split among the processes; the rest is whole on each."""

    name: str
    weights: bool
    gradients: bool
    moments: bool
    deepspeed: bool


SHARDINGS = (
    Sharding("DDP", False, False, False, False),
    Sharding("ZeRO-1", False, False, True, True),
    Sharding("ZeRO-2", False, True, True, True),
    Sharding("ZeRO-3", True, True, True, True),
    Sharding("FSDP2", True, True, True, False),
)


def memory_by_part(
    parameters: Iterable[Tensor],
    layout: Sharding,
    processes: int,
    rollout: bool = False,
    optim: str = "",
) -> dict[str, float]:
    """Return the bytes by part that a process keeps of parameters, as it updates or samples.

    Frozen parameters have weights alone.
    """
    total: dict[str, float] = {}
    for parameter in {id(p): p for p in parameters}.values():
        b = parameter.element_size()
        each = {"weights": b / (processes if layout.weights else 1)}
        if rollout:
            each["copy to sample from"] = b if layout.weights else 0
        if parameter.requires_grad:
            # In torch's AdamW moments have the dtype that it updates: of masters for 16 bits.
            moments = 8 if layout.deepspeed else 2 * max(b, 4)
            moments = 2 if optim == "adamw_8bit" else moments
            # In float32 ZeRO-3 updates its share of the weights; ZeRO-1 and ZeRO-2 copy it first.
            masters = 4 if b < 4 or (layout.deepspeed and not layout.weights) else 0
            each["moments"] = moments / (processes if layout.moments else 1)
            each["masters"] = masters / (processes if layout.moments else 1)
            kept = not rollout or layout.name == "ZeRO-3"  # it never gives back their memory
            each["gradients"] = kept * b / (processes if layout.gradients else 1)
            if layout.name == "DDP" and processes > 1:
                each["gradients"] += b  # its buckets
        for name, size in each.items():
            total[name] = total.get(name, 0.0) + size * parameter.numel()
    return total
