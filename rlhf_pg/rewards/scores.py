"""What is done to scores before they are trained on: pure functions on tensors.

Shapes: B completions, T columns, K sources of reward. Scores (B,T,K) stand at the token that ends
what they judge, a step or the whole completion, and are NaN where there is none.
"""

import torch
from torch import Tensor


def sum_step_scores(scores: Tensor) -> Tensor:
    """(B,T,K) -> (B,K) what each source pays for a completion, its steps summed; NaN for nothing.

    This is what group baselines, metrics, samples and evaluation look at.
    """
    return scores.nansum(1).masked_fill(scores.isnan().all(1), torch.nan)


def ends(mask: Tensor) -> Tensor:
    """(B,T) -> (B,) the column of each row's last True slot; where there is none, the last."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def at_end(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores of whole completions (B,) at the last True slot of each row: (B,T), NaN elsewhere."""
    nowhere = scores.new_full(mask.shape, torch.nan)
    return nowhere.scatter(1, ends(mask)[:, None], scores[:, None])


def clipped(scores: Tensor, low: float, high: float) -> Tensor:
    """min(max(s, low), high) for every score by itself, of a step or of a completion.

    Args:
        scores: any shape; NaN stays.
    """
    return scores.clamp(low, high)


def min_max(scores: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(s - low) / (high - low), in [0, 1]; 0 where the two are equal.

    Args:
        scores: (B,T,K); NaN stays.
        low, high: (K,) the lowest and the highest score of each source.
    """
    gap = high - low
    return (scores - low) / gap.where(gap > 0, 1.0)


def overlong(lengths: Tensor, longest: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment (DAPO; Yu et al. 2025, Eq. 13), which is negative or 0.

        |y| <= L - C          0
        L - C < |y| <= L      penalty ((L - C) - |y|) / C
        L < |y|               -penalty

    so that a completion of exactly L tokens pays all of it.

    Args:
        lengths: (B,) |y|, tokens of each completion.
        longest: L, the longest completion that is sampled.
        buffer: C.
        penalty: 1 in the paper.

    Returns:
        (B,) float64.
    """
    beyond = lengths.double() - (longest - buffer)
    return -penalty * (beyond / buffer).clamp(0, 1)


def replaced(scores: Tensor, rows: Tensor, mask: Tensor, source: int) -> Tensor:
    """The scores, one source in place of all others in some rows (N Implementation Details).

    There every other source counts 0, once, at the last True slot: also one that did not apply,
    or the mean of its group would stand in for it.

    Args:
        scores: (B,T,K).
        rows: (B,) bool.
        mask: (B,T) action tokens.
        source: which of the K stays.
    """
    blank = at_end(scores.new_zeros(len(scores)), mask)[:, :, None].expand_as(scores)
    others = torch.arange(scores.shape[2], device=scores.device) != source
    return torch.where(rows[:, None, None] & others, blank, scores)
