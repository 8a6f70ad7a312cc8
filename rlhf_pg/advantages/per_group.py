"""Advantages per completion, from its score and those of its group, the rows that share a prompt.

Shapes: (N,), one entry per row; NaN where no score applies to a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pg.advantages.per_token import discounted_returns
from rlhf_pg.masking import float_dtype, widen

SCALES = ("group", "batch", "mean", "none")


@dataclass(frozen=True)
class GroupStats:
    """Statistics of the group that each element belongs to, one entry per element."""

    count: Tensor  # valid elements
    mean: Tensor
    std: Tensor  # ddof 1; 0 for a single element
    constant: Tensor  # bool: fewer than two valid elements, or all of them equal


def group_stats(x: Tensor, valid: Tensor, groups: Tensor) -> GroupStats:
    """Compute count, mean and std (ddof 1) of each group's valid elements.

    Args:
        x: (N,) floating, in the dtype to compute in; may be anything where not valid.
        valid: (N,) bool.
        groups: (N,) elements with equal ids belong together.

    Returns:
        (N,) each: every element gets the statistics of its own group.
    """
    index, size = _index(groups)
    zeros = torch.zeros(size, dtype=x.dtype, device=x.device)
    count = zeros.index_add(0, index, valid.to(x.dtype))
    low = (zeros + torch.inf).scatter_reduce(0, index, x.where(valid, torch.inf), "amin")
    high = (zeros - torch.inf).scatter_reduce(0, index, x.where(valid, -torch.inf), "amax")
    constant = low >= high
    unit = _power_of_two(torch.maximum(low.abs(), high.abs()))
    x = torch.where(valid, x, 0.0) / unit[index]
    mean = zeros.index_add(0, index, x) / count.clamp(min=1)
    square = torch.where(valid, (x - mean[index]) ** 2, 0.0)
    std = (zeros.index_add(0, index, square) / (count - 1).clamp(min=1)).sqrt() * unit
    # Rounding would put the mean of equal numbers slightly off: take the number itself.
    mean = torch.where(constant & (count > 0), high, mean * unit)
    return GroupStats(count[index], mean[index], std[index], constant[index])


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most x; 1 where x is infinite or 0.

    Dividing by it before squaring changes no digit, and no square overflows the dtype.
    """
    unit = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
    return unit.where(x.isfinite() & (x > 0), 1.0)


def _index(groups: Tensor) -> tuple[Tensor, int]:
    names, index = torch.unique(groups, return_inverse=True)
    return index, len(names)


@torch.no_grad()
def group_normalized(
    scores: Tensor, groups: Tensor, scale: str = "group", eps: float = 1e-4
) -> Tensor:
    """Normalise a score by the mean and std of its group (GRPO; DeepSeekMath, section 4.1.2).

        A_i = (s_i - mean of its group) / (std + eps)

    The mean counts the row itself, which shrinks the gradient of a group of G rows by 1 - 1/G and
    keeps its direction. The group's std weighs prompts by how much their scores agree, which
    changes the direction.

    Args:
        scores: (N,) NaN where no score applies: such a row is excluded from the statistics and gets
            0.
        groups: (N,) rows with equal ids share a prompt.
        scale: divide by the std of the "group", by that of the "batch" (all valid scores), or by
            nothing, "none" (Dr. GRPO; Liu et al. 2025). Both take Bessel's correction (ddof 1).
            "mean" divides by the group's mean, without eps, and gives 0 where it is not above 0
            (MaxRL; Tajwar et al. 2026, Algorithm 1). For scores of 0 and 1 the gradient is exactly
            that of sum_{k<G} pass@k / k, which is log p(correct) up to order G - 1.

    Returns:
        (N,); exactly 0 for a group with one valid score or with all scores equal.

    Raises:
        ValueError: the scale is unknown.

    Elsewhere: verl takes mean 0 and std 1 for a group of one, so the raw score comes through. TRL
    has the same formula, but gives seven float32 scores of 0.1 a small number instead of 0.
    prime-rl has "mean" as it is here.
    """
    valid = ~scores.isnan()
    wide = widen(scores)
    group = group_stats(wide, valid, groups)
    if scale == "group":
        divisor = group.std + eps
    elif scale == "batch":
        divisor = group_stats(wide, valid, torch.zeros_like(groups)).std + eps
    elif scale == "mean":
        divisor = group.mean.where(group.mean > 0, torch.inf)
    elif scale == "none":
        divisor = torch.ones_like(wide)
    else:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    return torch.where(valid & ~group.constant, (wide - group.mean) / divisor, 0.0).to(
        float_dtype(scores)
    )


@torch.no_grad()
def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Subtract the mean score of the others of the group (RLOO; Kool 2019, Ahmadian et al. 2024).

        A_i = s_i - 1/(G-1) sum_{j != i} s_j = G/(G-1) (s_i - mean)

    The baseline does not depend on the row itself, so the policy gradient is unbiased.

    Args:
        scores, groups: (N,), as in `group_normalized`.

    Returns:
        (N,); exactly 0 for NaN, for a group with one valid score and for one with all scores equal.

    Elsewhere: TRL has the same formula, but its 0 comes from `nan_to_num`, which also turns an
    infinite score into 3e38. The RLHF book takes the others of the batch; it should take those of
    the same prompt.
    """
    valid = ~scores.isnan()
    wide = widen(scores)
    group = group_stats(wide, valid, groups)
    # s - (n m - s) / (n - 1)  =  n / (n - 1) * (s - m)
    advantage = (wide - group.mean) * group.count / (group.count - 1).clamp(min=1)
    return torch.where(valid & ~group.constant, advantage, 0.0).to(float_dtype(scores))


@torch.no_grad()
def optimal_baseline(scores: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """Compute a least-variance leave-one-out baseline (Weaver & Tao 2001; Greensmith et al. 2004).

        b   = E[w R] / E[w],   w = |grad log pi(y)|^2, minimises E|grad log pi(y) (R - b)|^2
        b_i = sum_{j != i} w_j s_j / sum_{j != i} w_j

    b_i does not depend on the row itself, so the policy gradient of s_i - b_i is unbiased.

    Args:
        scores, groups: (N,), as in `group_normalized`.
        weights: (N,) non-negative, in any unit: squared gradient norms, or a quantity proportional
            to them (OPO, Hao et al. 2025: the length, since the gradients of tokens are nearly
            orthogonal and equally long).

    Returns:
        (N,) baselines: exactly the common score where all are equal; 0 for NaN, and where the
        other rows have no weight, as in a group of one: with its own score as the baseline, a row
        would have no gradient.

    Elsewhere: the paper's estimate and verl's `opo` count the row itself, which biases the
    gradient.
    """
    valid = ~scores.isnan()
    wide = widen(scores)
    weights = torch.where(valid, weights.to(wide), 0.0)
    mean = group_stats(wide, valid, groups).mean
    # About the mean of the group, so that a shift of all scores costs no digits.
    moments = torch.where(valid, weights * (wide - mean), 0.0)
    total = _group_sum(weights, groups) - weights
    baseline = mean + (_group_sum(moments, groups) - moments) / total
    return torch.where(valid & (total > 0), baseline, 0.0).to(float_dtype(scores))


def _group_sum(x: Tensor, groups: Tensor) -> Tensor:
    index, size = _index(groups)
    return torch.zeros(size, dtype=x.dtype, device=x.device).index_add(0, index, x)[index]


@torch.no_grad()
def process_group_normalized(
    step_scores: Tensor, step_mask: Tensor, groups: Tensor, mask: Tensor, eps: float = 1e-4
) -> Tensor:
    """Compute the advantages of GRPO with process supervision (DeepSeekMath, section 4.1.3).

        A_t = sum of (s_j - mean) / (std + eps) over the steps j that end at t or later

    The mean and the (ddof 1) std are those of all step scores of the group, the row's own included.
    So the gradient is biased as that of `group_normalized` is, and also by the number of steps,
    since the baseline is subtracted once per step.

    Args:
        step_scores: (B,T) a score in the column of each step's last token.
        step_mask: (B,T) True where there is a step score.
        groups: (B,).
        mask: (B,T) the action tokens; a step score elsewhere is ignored.

    Returns:
        (B,T); exactly 0 for a group with one step score or with all of them equal.
    """
    step_mask = step_mask & mask
    wide = widen(step_scores)
    each = groups[:, None].expand_as(step_scores).reshape(-1)
    stats = group_stats(wide.reshape(-1), step_mask.reshape(-1), each)
    normal = (wide - stats.mean.view_as(wide)) / (stats.std.view_as(wide) + eps)
    normal = torch.where(step_mask & ~stats.constant.view_as(step_mask), normal, 0.0)
    return discounted_returns(normal, mask).to(float_dtype(step_scores))
