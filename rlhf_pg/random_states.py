"""The states of the random generators of a process, as tensors."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_tensors() -> dict[str, Tensor]:
    """The states of every generator of this process, as tensors."""
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
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Any]) -> None:
    """The inverse of `rng_tensors`."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    numbers = tuple(states["python"].tolist())
    random.setstate((3, numbers, None if gauss != gauss else gauss))
    position, has_gauss, cached = states["numpy_rest"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
