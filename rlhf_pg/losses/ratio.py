"""The probability ratio of a token, and the terms shared by all losses with a ratio."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pg.masking import masked_mean

SAMPLING_LEVELS = ("token", "sequence")

MAX_LOG_RATIO = 20.0

Loss = tuple[Tensor, dict[str, Tensor]]


class RatioTerms(NamedTuple):
    """The terms shared by the losses with a ratio, each (B,T) and 0 (the ratio 1) where masked."""

    log_ratio: Tensor  # held within +-MAX_LOG_RATIO
    ratio: Tensor
    advantages: Tensor  # detached
    metrics: dict[str, Tensor]


def ratio_terms(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, level: str = "token"
) -> RatioTerms:
    """Compute the ratio of the "token", or of its row: "sequence" (geometric mean)."""
    tokens = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    log_ratio = tokens
    if level == "sequence":
        log_ratio = torch.where(mask, masked_mean(tokens, mask, dim=1)[:, None], 0.0)
    bounded = held(log_ratio)
    ratio = bounded.exp()
    metrics = {
        "ratio_overflow": (log_ratio.abs() > MAX_LOG_RATIO).to(ratio.dtype),
        "ratio": torch.where(mask, ratio.detach(), 0.0),
        "approx_kl": excess(held(tokens)).detach(),
    }
    return RatioTerms(bounded, ratio, torch.where(mask, advantages.detach(), 0.0), metrics)


def held(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def excess(log_ratio: Tensor) -> Tensor:
    """Return rho - 1 - log rho, never negative and with the mean KL(pi_old || pi) under pi_old."""
    return torch.expm1(log_ratio) - log_ratio


def bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)


def clip_metrics(low: Tensor, high: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    low, high = low.to(dtype), high.to(dtype)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
