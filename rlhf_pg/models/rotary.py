"""LongRoPE positions (Ding et al. 2024), settled for a run."""

from typing import Any

import torch
from torch import nn

LONG, SETTLED = "longrope", "longrope, settled"


def settle_positions(model: nn.Module, longest: int) -> None:
    """Make the positions of every row turn at one speed, whatever the row's length and batch.

    Beyond its original length such a model changes the speed: for all rows of a batch once one of
    them is that long, and in sampling from one token on, while earlier keys stay as they are.
    Sampling and scoring would then disagree. Here the longest row of the run decides, as in vLLM.

    Args:
        longest: the most tokens that a row of the run may reach.
    """
    rotary: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == LONG]
    for module in rotary:
        last = torch.tensor([[longest - 1]], device=module.inv_freq.device)
        module(module.inv_freq, last)
        module.rope_type = SETTLED


def is_settled(model: nn.Module) -> bool:
    """Return whether `settle_positions` changed the model."""
    return any(getattr(module, "rope_type", None) == SETTLED for module in model.modules())
