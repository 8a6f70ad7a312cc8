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


def bytes_per_parameter(
    layout: Sharding, b: int, processes: int, rollout: bool = False, optim: str = ""
) -> dict[str, float]:
    """Return what a process keeps of a trained parameter of `b` bytes, as it updates or samples."""
    # In torch's AdamW they have the dtype that it updates: that of the masters for 16-bit weights.
    moments = 8 if layout.deepspeed else 2 * max(b, 4)
    if optim == "adamw_8bit":
        moments = 2
    # In float32 ZeRO-3 updates its share of the weights itself; ZeRO-1 and ZeRO-2 copy it first.
    masters = 4 if b < 4 or (layout.deepspeed and not layout.weights) else 0
    found = {
        "weights": b / (processes if layout.weights else 1),
        "gradients": b / (processes if layout.gradients else 1),
        "moments": moments / (processes if layout.moments else 1),
        "masters": masters / (processes if layout.moments else 1),
    }
    if layout.name == "DDP" and processes > 1:
        found["buckets"] = b
    if rollout:
        if layout.name != "ZeRO-3":  # which never gives back the memory of its gradients
            del found["gradients"]
        found["copy"] = b if layout.weights else 0
    return found


def memory_by_part(
    parameters: Iterable[Tensor],
    layout: Sharding,
    processes: int,
    rollout: bool = False,
    optim: str = "",
) -> dict[str, float]:
    """Return the bytes by part on a process; frozen parameters have weights alone."""
    total: dict[str, float] = {}
    for parameter in {id(p): p for p in parameters}.values():
        each = bytes_per_parameter(layout, parameter.element_size(), processes, rollout, optim)
        for name, size in each.items():
            if parameter.requires_grad or name in ("weights", "copy"):
                total[name] = total.get(name, 0.0) + size * parameter.numel()
    return total
