"""Noise as a function of its coordinates, and the states of the random generators.

The noise is SplitMix64 (Steele et al. 2014) on int64 tensors, whose arithmetic wraps around. The
coordinates are mixed in one after another.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """Take one step of SplitMix64: each of the 64 bits depends on every bit of `x`."""
    x = x + as_signed(0x9E3779B97F4A7C15)
    x = (x ^ shift(x, 30)) * as_signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * as_signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically (torch's own shift keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_signed(x: int) -> int:
    """Return the int64 with the low 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of all random generators of this process, as tensors."""
    version, numbers, gauss = random.getstate()
    twister: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = twister
    assert version == 3
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor([torch.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():  # pragma: no cover
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Any]) -> None:
    """Restore the states from `rng_tensors`."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    numbers = tuple(states["python"].tolist())
    random.setstate((3, numbers, None if gauss != gauss else gauss))
    position, has_gauss, cached = states["numpy_rest"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():  # pragma: no cover
        torch.cuda.set_rng_state(states["cuda"])
