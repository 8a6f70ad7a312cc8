"""Pearson's chi-square test."""

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Probability of counts at least this far from `probs` (K,) under the multinomial law.

    Cells expected fewer than five times are pooled into one. The tail of the chi-square
    distribution with k degrees of freedom is the regularised upper gamma function Q(k/2, x/2).
    """
    counts, expected = counts.double(), probs.double() * counts.sum()
    rare = expected < 5
    if rare.any():
        counts, expected = _pool(counts, rare), _pool(expected, rare)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


def _pool(x: Tensor, rare: Tensor) -> Tensor:
    return torch.cat([x[~rare], x[rare].sum(0, keepdim=True)])
