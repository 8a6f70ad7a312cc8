"""Rotary positions of LongRoPE (Ding et al. 2024), settled for a run."""

from typing import Any

import torch
from torch import nn

LONG, SETTLED = "longrope", "longrope, settled"


def settle_positions(model: nn.Module, longest: int) -> None:
    """Let the positions of every row turn at one speed, whatever the row's length and company.

    Such a model turns them otherwise beyond its original length: for all rows of a batch once one
    of them is there, and in sampling from one token on, whose earlier keys stay as they are. Then
    what samples is not what is scored. Here the longest row of the run decides, as in vLLM.

    Args:
        longest: tokens that a row of the run may come to.
    """
    rotary: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == LONG]
    for module in rotary:
        last = torch.tensor([[longest - 1]], device=module.inv_freq.device)
        module(module.inv_freq, last)
        module.rope_type = SETTLED


def is_settled(model: nn.Module) -> bool:
    """Whether `settle_positions` found something to do."""
    return any(getattr(module, "rope_type", None) == SETTLED for module in model.modules())
