"""Advantage estimators: how much better was each token, or each completion, than expected?

Shapes: B rows and T columns on this rank, N rows on all ranks. Every function returns detached
tensors in the floating dtype of its input, with 0 in masked slots. A mask may have holes (tool
output): False slots are skipped, t+1 means the next True slot, and gamma and lam count True slots.

`ADVANTAGES` at the end names the estimators that a config can choose. To add one, write a function
of `Signals` and give it a line there; its keyword-only parameters are config keys of the same name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pg.masking import float_dtype, widen

SCALES = ("group", "batch", "none")

# ------------------------------------------------------------------------- per token, along a row


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Reward-to-go (B,T): G_t = r_t + gamma G_{t+1} (Williams 1992; Sutton & Barto, 3.8)."""
    wide = widen(rewards)
    running = wide.new_zeros(wide.shape[0])
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], wide[:, t] + gamma * running, running)
        returns[:, t] = torch.where(mask[:, t], running, 0.0)
    return returns


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16; PPO Eq. 11 where truncated).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    Args:
        rewards, values: (B,T); `values[:, t]` is V of the state *before* token t.
        mask: (B,T).
        bootstrap_value: (B,) V of the state after the last True slot of a truncated row; 0, or None
            for all rows, where the episode really ended.

    Returns:
        advantages (B,T), not whitened, and returns (B,T) = advantages + values.
    """
    wide = widen(values)
    next_value = _bootstrap(wide, bootstrap_value)
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(wide)
    for t in reversed(range(wide.shape[1])):
        real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - wide[:, t]
        running = torch.where(real, delta + gamma * lam * running, running)
        next_value = torch.where(real, wide[:, t], next_value)
        advantages[:, t] = torch.where(real, running, 0.0)
    returns = torch.where(mask, advantages + wide, 0.0)
    return advantages.to(values.dtype), returns.to(values.dtype)


@torch.no_grad()
def n_step(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    n: int | None,
    gamma: float = 1.0,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """n-step advantages and their targets (Mnih et al. 2016, section 4).

        R_t = r_t + ... + gamma^{n-1} r_{t+n-1} + gamma^n V_{t+n},   A_t = R_t - V_t

    n = 1 is online A2C. With n = None, or past the end of a row, the sum runs to the end and V
    there is `bootstrap_value` (see `gae`).

    Returns:
        advantages (B,T) and targets R (B,T).

    Raises:
        ValueError: n below 1.
    """
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, or None for the whole row, got {n}")
    width = values.shape[1]
    wide = widen(values)
    # Push the holes to the right, so that "next True slot" is "next column".
    order = torch.argsort(mask.logical_not(), dim=1, stable=True)
    dense = mask.gather(1, order)
    end = _bootstrap(wide, bootstrap_value)[:, None].expand_as(wide)
    reward = torch.where(dense, rewards.gather(1, order), 0.0)
    value = torch.where(dense, wide.gather(1, order), end)
    target = value
    for _ in range(width if n is None else min(n, width)):
        # R^(k)_t = r_t + gamma R^(k-1)_{t+1}, starting from R^(0)_t = V_t.
        following = torch.cat([target[:, 1:], end[:, :1]], dim=1)
        target = torch.where(dense, reward + gamma * following, end)
    targets = torch.zeros_like(wide).scatter(1, order, torch.where(dense, target, 0.0))
    advantages = torch.where(mask, targets - wide, 0.0)
    return advantages.to(values.dtype), targets.to(values.dtype)


def _bootstrap(values: Tensor, bootstrap_value: Tensor | None) -> Tensor:
    if bootstrap_value is None:
        return values.new_zeros(values.shape[0])
    return bootstrap_value.detach().to(values)


# -------------------------------------------------------------- per completion, against its group


@dataclass(frozen=True)
class GroupStats:
    """Statistics of the group that each element belongs to, one entry per element."""

    count: Tensor  # valid elements
    mean: Tensor
    std: Tensor  # with Bessel's correction; 0 for a single element
    constant: Tensor  # bool: fewer than two valid elements, or all of them equal


def group_stats(x: Tensor, valid: Tensor, groups: Tensor) -> GroupStats:
    index, size = _index(groups)
    zeros = torch.zeros(size, dtype=x.dtype, device=x.device)
    x = torch.where(valid, x, 0.0)
    count = zeros.index_add(0, index, valid.to(x.dtype))
    mean = zeros.index_add(0, index, x) / count.clamp(min=1)
    square = torch.where(valid, (x - mean[index]) ** 2, 0.0)
    std = (zeros.index_add(0, index, square) / (count - 1).clamp(min=1)).sqrt()
    low = (zeros + torch.inf).scatter_reduce(0, index, x.where(valid, torch.inf), "amin")
    high = (zeros - torch.inf).scatter_reduce(0, index, x.where(valid, -torch.inf), "amax")
    constant = low >= high
    # The mean of equal numbers is off by rounding: take the number itself.
    mean = torch.where(constant & (count > 0), high, mean)
    return GroupStats(count[index], mean[index], std[index], constant[index])


def _index(groups: Tensor) -> tuple[Tensor, int]:
    names, index = torch.unique(groups, return_inverse=True)
    return index, len(names)


@torch.no_grad()
def group_normalized(
    scores: Tensor, groups: Tensor, scale: str = "group", eps: float = 1e-4
) -> Tensor:
    """A_i = (s_i - mean of its group) / (std + eps) (GRPO; DeepSeekMath, section 4.1.2).

    Args:
        scores: (N,) NaN where no score applies: such a row is excluded from the statistics and
            gets 0.
        groups: (N,) rows with equal ids share a prompt.
        scale: std of the "group", of the "batch" (all valid scores), or "none", which divides by
            nothing (Dr. GRPO; Liu et al. 2025). Both take Bessel's correction (ddof 1).

    Returns:
        (N,); exactly 0 for a group with one valid score or with all scores equal.

    Raises:
        ValueError: an unknown scale.
    """
    valid, wide = ~scores.isnan(), widen(scores)
    group = group_stats(wide, valid, groups)
    if scale == "group":
        divisor = group.std + eps
    elif scale == "batch":
        divisor = group_stats(wide, valid, torch.zeros_like(groups)).std + eps
    elif scale == "none":
        divisor = torch.ones_like(wide)
    else:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    return torch.where(valid & ~group.constant, (wide - group.mean) / divisor, 0.0).to(
        float_dtype(scores)
    )


@torch.no_grad()
def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """A_i = s_i - mean of the *other* scores of its group (RLOO; Kool 2019, Ahmadian 2024).

    The baseline does not depend on the row itself, so the policy gradient stays unbiased. Shapes
    and the rules for NaN, single and equal scores are those of `group_normalized`.
    """
    valid, wide = ~scores.isnan(), widen(scores)
    group = group_stats(wide, valid, groups)
    # s - (n m - s) / (n - 1)  =  n / (n - 1) * (s - m)
    advantage = (wide - group.mean) * group.count / (group.count - 1).clamp(min=1)
    return torch.where(valid & ~group.constant, advantage, 0.0).to(float_dtype(scores))


@torch.no_grad()
def process_group_normalized(
    step_scores: Tensor, step_mask: Tensor, groups: Tensor, mask: Tensor, eps: float = 1e-4
) -> Tensor:
    """GRPO with process supervision (DeepSeekMath, section 4.1.3).

    Every step score is normalised by the mean and (ddof 1) std of all step scores of its group;
    A_t is the sum of the normalised scores at columns >= t.

    Args:
        step_scores: (B,T) a score in the column of each step's last token.
        step_mask: (B,T) True where there is one.
        groups: (B,).
        mask: (B,T) the action tokens; a step score elsewhere is ignored.

    Returns:
        (B,T); exactly 0 for a group with one step score or with all of them equal.
    """
    step_mask, wide = step_mask & mask, widen(step_scores)
    each = groups[:, None].expand_as(step_scores).reshape(-1)
    stats = group_stats(wide.reshape(-1), step_mask.reshape(-1), each)
    normal = (wide - stats.mean.view_as(wide)) / (stats.std.view_as(wide) + eps)
    normal = torch.where(step_mask & ~stats.constant.view_as(step_mask), normal, 0.0)
    to_go = normal.flip(1).cumsum(1).flip(1)
    return torch.where(mask, to_go, 0.0).to(float_dtype(step_scores))


# --------------------------------------------------------------------- what a config chooses from


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Everything an estimator may look at.

    The scores are those of every rank, for baselines over the batch; `rows` finds this rank's.
    """

    rewards: Tensor  # (B,T) paid per token: the score at the last action token, -beta KL at each
    mask: Tensor  # (B,T) action tokens
    scores: Tensor  # (N,K) weighted score per source, and -beta KL summed; NaN: does not apply
    groups: Tensor  # (N,)
    rows: slice  # this rank's B rows among the N
    values: Tensor | None = None  # (B,T) V of the state before each token, where there is a critic
    bootstrap_value: Tensor | None = None  # (B,) see `gae`; None: every episode really ended

    def per_token(self, advantages: Tensor) -> Tensor:
        """Spread one number per row, (N,), over this rank's action tokens, (B,T)."""
        return torch.where(self.mask, advantages[self.rows, None].to(self.rewards), 0.0)


def total_scores(scores: Tensor, groups: Tensor) -> Tensor:
    """Sum of the sources, (N,K) -> (N,).

    Where a source does not apply to a row (NaN), the mean of that source in the row's group stands
    in: after the group mean is subtracted, the row is neutral in that source.
    """
    columns = []
    for column in widen(scores).unbind(1):
        valid = ~column.isnan()
        columns.append(column.where(valid, group_stats(column, valid, groups).mean))
    return torch.stack(columns, dim=1).sum(1).to(scores.dtype)


def _normalized_in_group(signals: Signals, *, scale_rewards: str = "group") -> Tensor:
    scores = total_scores(signals.scores, signals.groups)
    return signals.per_token(group_normalized(scores, signals.groups, scale_rewards))


def _minus_others_in_group(signals: Signals) -> Tensor:
    columns = signals.scores.unbind(1)
    return signals.per_token(
        torch.stack([leave_one_out(c, signals.groups) for c in columns]).sum(0)
    )


def _returns(signals: Signals, *, gamma: float = 1.0) -> Tensor:
    """No baseline: A_t = G_t."""
    return discounted_returns(signals.rewards, signals.mask, gamma)


def _returns_minus_others(signals: Signals, *, gamma: float = 1.0) -> Tensor:
    """A_t = G_t - b_i, where b_i is the mean score of the *other* rows of the batch: unbiased."""
    everyone = torch.zeros_like(signals.groups)
    columns = signals.scores.unbind(1)
    above_others = torch.stack([leave_one_out(c, everyone) for c in columns]).sum(0)
    baseline = signals.scores.nansum(1) - above_others
    return _returns(signals, gamma=gamma) - signals.per_token(baseline)


def _returns_minus_mean(signals: Signals, *, gamma: float = 1.0) -> Tensor:
    """A_t = G_t - mean score of the N rows, own row included: the gradient times (1 - 1/N)."""
    scores = signals.scores
    baseline = torch.where(scores.isnan(), 0.0, scores.nanmean(0, keepdim=True)).sum(1)
    return _returns(signals, gamma=gamma) - signals.per_token(baseline)


def _gae(signals: Signals, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """From the critic's values, and from the row's own rewards alone."""
    assert signals.values is not None  # the config lets only trainers with a critic choose it
    return gae(signals.rewards, signals.values, signals.mask, gamma, lam, signals.bootstrap_value)[
        0
    ]


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "gae": _gae,
    "group_normalized": _normalized_in_group,
    "leave_one_out": _minus_others_in_group,
    "returns": _returns,
    "returns_minus_others": _returns_minus_others,
    "returns_minus_mean": _returns_minus_mean,
}
