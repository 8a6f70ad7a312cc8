"""Transformations of scores before they are trained on: pure functions on tensors.

Shapes: B completions, T columns, K sources of reward. A score in (B,T,K) is at the last token of
the step or completion that it judges; other entries are NaN.
"""

import torch
from torch import Tensor


def sum_step_scores(scores: Tensor) -> Tensor:
    """Sum step scores (B,T,K) to each source's score of a completion, (B,K); NaN if there is none.

    Group baselines, metrics, samples and evaluation use this sum.
    """
    return scores.nansum(1).masked_fill(scores.isnan().all(1), torch.nan)


def last_true(mask: Tensor) -> Tensor:
    """Return the column of each row's last True slot, (B,T) -> (B,); the last column if none."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


def at_end(scores: Tensor, mask: Tensor) -> Tensor:
    """Place scores of completions (B,) at the last True slot of each row: (B,T), else NaN."""
    nowhere = scores.new_full(mask.shape, torch.nan)
    return nowhere.scatter(1, last_true(mask)[:, None], scores[:, None])


def overlong(lengths: Tensor, longest: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Compute the soft overlong punishment (DAPO; Yu et al. 2025, Eq. 13), which is negative or 0.

        |y| <= L - C          0
        L - C < |y| <= L      penalty ((L - C) - |y|) / C
        L < |y|               -penalty

    so that a completion of exactly L tokens gets the whole penalty.

    Args:
        lengths: (B,) |y|, tokens of each completion.
        longest: L, the limit on the length of completions.
        buffer: C, the tokens over which the penalty grows.
        penalty: 1 in the paper.

    Returns:
        (B,) float64.
    """
    beyond = lengths.double() - (longest - buffer)
    return -penalty * (beyond / buffer).clamp(0, 1)


def replace_sources(scores: Tensor, rows: Tensor, mask: Tensor, source: int) -> Tensor:
    """Replace all sources but one in some rows, (B,) bool (N Implementation Details).

    In those rows every other source scores 0 at the last True slot of `mask` (B,T), even one that
    gave no score, since the mean of its group would otherwise replace it.
    """
    blank = at_end(scores.new_zeros(len(scores)), mask)[:, :, None].expand_as(scores)
    others = torch.arange(scores.shape[2], device=scores.device) != source
    return torch.where(rows[:, None, None] & others, blank, scores)
