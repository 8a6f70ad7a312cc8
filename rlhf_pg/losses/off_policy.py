"""The mismatch between the sampler's and the policy's log-probabilities, and its correction."""

import math

import torch
from torch import Tensor

from rlhf_pg.losses.policy import MAX_LOG_RATIO
from rlhf_pg.masking import widen

SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: str,
    clip_max: float = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Compute importance weights for an engine whose probabilities differ (TIS; Yao et al. 2025).

        w_t = pi_old(y_t) / pi_sampler(y_t); for "sequence_*" the product of w_t over the row
        *_truncate: clip(w, clip_min, clip_max)
        *_mask:     w where clip_min <= w <= clip_max, else 0

    The weights multiply the per-token policy loss; its denominator stays as it is. Only the
    unbounded product over the row makes the gradient unbiased: a token's own weight ignores how the
    sampler came to the tokens before it, and every bound trades bias for variance.

    Args:
        old_logprobs, sampler_logprobs: (B,T) of the policy before the update, as computed by the
            trainer and by the engine.
        mask: (B,T) action tokens.
        mode: a name in SAMPLER_CORRECTIONS.
        clip_max, clip_min: bounds of w; `clip_min` None means 0.

    Returns:
        (B,T), detached, with |log w| limited to 20.

    Elsewhere: TRL has the same four modes; its default is "sequence_mask" with 3.0.
    """
    level, bound = mode.split("_")
    log_weight = torch.where(mask, old_logprobs.detach() - sampler_logprobs.detach(), 0.0)
    if level == "sequence":
        log_weight = widen(log_weight).sum(dim=1, keepdim=True).to(log_weight.dtype)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low = 0.0 if clip_min is None else clip_min
    clipped = weight.clamp(low, clip_max)
    if bound == "mask":
        clipped = torch.where(clipped == weight, weight, 0.0)
    return torch.where(mask, clipped, 0.0)


def against_sampler(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: str,
    clip_max: float = 3.0,
    clip_min: float | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the weights (B,T) of a correction, None for the mode "none", and (B,T) numbers to log.

    The numbers are the weights (without a correction, the plain ratios) and the differences.

    Args:
        old_logprobs, sampler_logprobs, mask, clip_max, clip_min: as in `sampler_weights`.
        mode: a name in SAMPLER_CORRECTIONS, or "none".
    """
    if mode == "none":
        ratios = sampler_weights(old_logprobs, sampler_logprobs, mask, "token_truncate", math.inf)
    else:
        ratios = sampler_weights(old_logprobs, sampler_logprobs, mask, mode, clip_max, clip_min)
    difference = (old_logprobs - sampler_logprobs).abs()
    numbers = {f"sampling/importance_sampling_ratio/{x}": ratios for x in ("min", "mean", "max")}
    numbers |= {f"sampling/sampling_logp_difference/{x}": difference for x in ("mean", "max")}
    return (None if mode == "none" else ratios), numbers
