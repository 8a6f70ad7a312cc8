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


class Part(NamedTuple):
    """A kind of number that training keeps, with its bytes per parameter."""

    size: float
    shared: bool  # one N-th on each process
    stays: bool = True  # during the rollout too

    def on_each(self, processes: int) -> float:
        """Return the bytes per parameter on one process."""
        return self.size / (processes if self.shared else 1)

    def __str__(self) -> str:
        return f"{self.size:g}{'/N' if self.shared and self.size else ''}"


def parts(
    layout: Sharding,
    b: int,
    processes: int,
    bfloat16_update: str = "master_weights",
    optim: str = "adamw_torch_fused",
) -> dict[str, Part]:
    """Return what one process keeps of a fully trained model, in bytes per parameter of `b` bytes.

    Args:
        bfloat16_update, optim: keys of the config; DeepSpeed has masters whatever they say.
    """
    own = layout.deepspeed or bfloat16_update == "master_weights"
    # In torch's AdamW they have the dtype that it updates: that of the masters for 16-bit weights.
    moments = 8 if layout.deepspeed else 2 * (b if bfloat16_update == "nearest" else max(b, 4))
    if optim == "adamw_8bit":
        moments = 2
    # In float32 ZeRO-3 updates its share of the weights itself; ZeRO-1 and ZeRO-2 copy it first.
    masters = 4 if (b < 4 and own) or (layout.deepspeed and not layout.weights) else 0
    return {
        "weights": Part(b, layout.weights),
        # ZeRO-3 never gives back the memory of its gradients.
        "gradients": Part(b, layout.gradients, stays=layout.name == "ZeRO-3"),
        "buckets": Part(b if layout.name == "DDP" and processes > 1 else 0, False),
        "moments": Part(moments, layout.moments),
        "masters": Part(masters, layout.moments),
        "copy": Part(b if layout.weights else 0, False),
    }


def memory_by_part(
    parameters: Iterable[Tensor],
    layout: Sharding,
    processes: int,
    rollout: bool = False,
    **options: str,
) -> dict[str, float]:
    """Return the bytes of each part of these parameters on one process, updating or sampling.

    Frozen parameters have weights alone.

    Args:
        options: see `parts`.
    """
    total: dict[str, float] = {}
    for parameter in {id(p): p for p in parameters}.values():
        own = parts(layout, parameter.element_size(), processes, **options)
        for name, part in own.items():
            present = part.stays if rollout else name != "copy"
            if present and (parameter.requires_grad or name in ("weights", "copy")):
                size = part.on_each(processes) * parameter.numel()
                total[name] = total.get(name, 0.0) + size
    return total
