"""The weights that sum a loss per token to one number."""

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def token_weights(
    mask: Tensor,
    aggregation: str,
    max_completion_length: int | None = None,
    denominator: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the weight of every token in the loss, (B,T) (DAPO, Eq. 8; GRPO, Eq. 3; Dr. GRPO).

        token_mean     1 / sum of mask        every token counts the same (DAPO)
        sequence_mean  1 / (N len_i)          every completion counts the same (GRPO)
        constant       1 / (N max_length)     independent of length, hence unbiased (Dr. GRPO)

    N is the number of rows with a True slot. "constant" leaves an unbiased gradient unbiased, up to
    its scale. The denominator of "token_mean" depends on the lengths that were drawn, and
    "sequence_mean" weighs a completion by 1/length.

    Args:
        mask: (B,T) action tokens.
        max_completion_length: used by "constant" only.
        denominator: the count over the whole optimizer step and all ranks, of tokens for
            "token_mean" and of rows otherwise (see `weight_count`); by default that of `mask`.
        dtype: of the result; by default torch's default dtype.

    Raises:
        ValueError: the aggregation is unknown, or is "constant" without `max_completion_length`.

    Elsewhere: verl divides Dr. GRPO's sum by the padded width, so its scale depends on the longest
    completion in the batch. TRL's "bnpo" is a mean per micro-batch, so the split changes the
    gradient.
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
    """Count what the denominator of `token_weights` counts, tokens or rows, on these rows alone."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}"
        )
    return mask.sum() if aggregation == "token_mean" else mask.any(dim=1).sum()
