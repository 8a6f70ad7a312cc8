"""How much every token counts: the weights that make one number of a loss per token."""

import torch
from torch import Tensor

from rlhf_pg.losses.policy import MAX_LOG_RATIO
from rlhf_pg.masking import widen

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def token_weights(
    mask: Tensor,
    aggregation: str,
    max_completion_length: int | None = None,
    denominator: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight of every token in the loss (DAPO, Eq. 8; GRPO, Eq. 3; Dr. GRPO), (B,T).

        token_mean     1 / sum of mask        every token counts the same (DAPO)
        sequence_mean  1 / (N len_i)          every completion counts the same (GRPO)
        constant       1 / (N max_length)     no length in it at all: the unbiased one (Dr. GRPO)

    N is the number of rows with a True slot. "constant" leaves an unbiased gradient unbiased, up to
    its scale; the denominator of "token_mean" depends on the lengths that were drawn, and
    "sequence_mean" weighs a completion by 1/length.

    Args:
        mask: (B,T) action tokens.
        max_completion_length: for "constant".
        denominator: the count over the whole optimizer step and all ranks, of tokens for
            "token_mean" and of rows otherwise (see `weight_count`); by default that of `mask`.
        dtype: of the result; by default torch's default dtype.

    Raises:
        ValueError: an unknown aggregation, or "constant" without `max_completion_length`.

    Elsewhere: verl divides Dr. GRPO's sum by the padded width, so its scale depends on the longest
    completion beside it; TRL's "bnpo" is a mean per micro-batch, so the split changes the gradient.
    """
    own_count = weight_count(mask, aggregation)
    count = own_count if denominator is None else denominator
    dtype = dtype or torch.get_default_dtype()
    divisor = torch.as_tensor(count, device=mask.device).to(dtype).clamp(min=1)
    if aggregation == "sequence_mean":
        divisor = divisor * mask.sum(dim=1, keepdim=True).clamp(min=1)
    elif aggregation == "constant":
        if max_completion_length is None:
            raise ValueError('aggregation "constant" needs max_completion_length')
        divisor = divisor * max_completion_length
    return torch.where(mask, 1 / divisor, 0.0)


def weight_count(mask: Tensor, aggregation: str) -> Tensor:
    """What the denominator of `token_weights` counts, for these rows alone: tokens or rows."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}"
        )
    return mask.sum() if aggregation == "token_mean" else mask.any(dim=1).sum()


def sampler_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: str,
    clip_max: float = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Importance weights against an engine whose probabilities differ (TIS; Yao et al. 2025).

        w_t = pi_old(y_t) / pi_sampler(y_t); for "sequence_*" the product of w_t over the row
        *_truncate: clip(w, clip_min, clip_max)
        *_mask:     w where clip_min <= w <= clip_max, else 0

    To multiply the per-token policy loss with; its denominator stays. Only the row's whole product,
    unbounded, makes the gradient unbiased: a token's own weight ignores how the sampler came to the
    tokens before it, and every bound trades a bias for variance.

    Args:
        old_logprobs, sampler_logprobs: (B,T) of the policy before the update, by the trainer and by
            the engine.
        mask: (B,T) action tokens.
        mode: a name in SAMPLER_CORRECTIONS.
        clip_max, clip_min: bounds of w; None: 0.

    Returns:
        (B,T), detached, |log w| held at 20.

    Raises:
        ValueError: an unknown mode.

    Elsewhere: TRL has these four too; its default is "sequence_mask" with 3.0.
    """
    if mode not in SAMPLER_CORRECTIONS:
        raise ValueError(f"mode must be one of {', '.join(SAMPLER_CORRECTIONS)}, got {mode!r}")
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
