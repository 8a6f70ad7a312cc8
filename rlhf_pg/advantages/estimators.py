"""The advantage estimators that a config selects: functions of `AdvantageInputs`.

One of your own is `advantage_estimator: my_file.py:f`. To add one here, write the function, and
give it a line in `ADVANTAGES` and one in `ESTIMATORS` of `rlhf_pg.config.method`, with what it
needs. Its keyword-only parameters are config keys of the same name.

`estimate_x` applies `x` of `per_group` or `per_token`, which documents the formula. "Unbiased"
refers to the policy gradient, with gamma 1 and with the rewards that are given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.advantages import per_group, per_token
from rlhf_pg.masking import widen


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The inputs of an estimator.

    K counts the sources of reward; in the last of K+1 columns is the KL, which pays as they do. The
    scores are those of all ranks, for baselines over the batch; `rows` selects this rank's. A group
    is never split between ranks.
    """

    rewards: Tensor  # (B,T) per token: scores where their steps end, and -beta KL everywhere
    mask: Tensor  # (B,T) action tokens
    # (N,K+1) weighted score per source, and -beta KL summed. NaN: does not apply. A row without
    # policy tokens is all NaN.
    scores: Tensor
    groups: Tensor  # (N,)
    rows: slice  # this rank's B rows among the N
    action_tokens: Tensor  # (N,) tokens that the policy chose
    weights: Tensor | None = None  # (K+1,) of the sources and the KL; None: 1 each
    values: Any = None  # (B,T) V of the state before each token, where there is a critic
    bootstrap_value: Tensor | None = None  # (B,) see `gae`; None: every episode terminated
    greedy_scores: Tensor | None = None  # (B,K+1) weighted, of the greedy completion of the prompt
    moving_average: Any = None  # of the mean score of earlier steps, where a baseline is it
    step_scores: Tensor | None = None  # (B,T) weighted, at the last token of each step
    step_mask: Tensor | None = None  # (B,T) True at step scores; None: one score per completion

    def per_token(self, advantages: Tensor) -> Tensor:
        """Spread one number per row, (N,), over this rank's action tokens, (B,T)."""
        return self.over_tokens(advantages[self.rows])

    def over_tokens(self, numbers: Tensor) -> Tensor:
        """Spread one number per row of this rank, (B,), over its action tokens, (B,T)."""
        return torch.where(self.mask, numbers[:, None].to(self.rewards), 0.0)


def total_scores(scores: Tensor, groups: Tensor) -> Tensor:
    """Sum the reward sources, (N,K+1) -> (N,); NaN where none applies to a row.

    Where a source does not apply to a row (NaN), it is replaced by the source's mean in the row's
    group: once the group mean is subtracted, the row is neutral in that source.
    """
    nothing = scores.isnan().all(1)
    columns = []
    for column in widen(scores).unbind(1):
        valid = ~column.isnan()
        columns.append(column.where(valid, per_group.group_stats(column, valid, groups).mean))
    return torch.stack(columns, dim=1).sum(1).masked_fill(nothing, torch.nan).to(scores.dtype)


# ----------------------------------------------------------------------------- against the group


def estimate_group_normalized(
    inputs: AdvantageInputs, *, scale_rewards: str = "group", scale_rewards_eps: float = 1e-4
) -> Tensor:
    """Return A_i = (s_i - mean of its group) / (std + eps), at every token (GRPO)."""
    groups = inputs.groups
    scores = total_scores(inputs.scores, groups)
    return inputs.per_token(
        per_group.group_normalized(scores, groups, scale_rewards, scale_rewards_eps)
    )


def group_normalized_per_source(
    inputs: AdvantageInputs, *, scale_rewards_eps: float = 1e-4
) -> Tensor:
    """Return A_i = a_i / (std + eps), a_i = sum_k w_k (s_ik - mean) / (std + eps) (GDPO; Liu 2026).

    Each source k is normalised within the group on its own and then weighted, so that sources of
    any scale count as their weights say, and completions with equal sums but different scores
    differ. The outer std is that of all rows of the batch (their mean is 0).

    Elsewhere: TRL (`normalize_then_sum`) has the same formula; verl whitens over tokens, so long
    completions count for more in the std.
    """
    groups = inputs.groups
    eps = scale_rewards_eps
    scores = inputs.scores
    weights = torch.ones(scores.shape[1]) if inputs.weights is None else inputs.weights.abs()
    total = torch.zeros_like(groups, dtype=scores.dtype)
    for weight, column in zip(weights.tolist(), scores.unbind(1), strict=True):  # w_k s_ik
        total += weight * per_group.group_normalized(column, groups, eps=weight * eps)
    batch = per_group.group_stats(total, ~scores.isnan().all(1), torch.zeros_like(groups))
    return inputs.per_token(torch.where(batch.constant, 0.0, total / (batch.std + eps)))


def estimate_process_group_normalized(
    inputs: AdvantageInputs, *, scale_rewards_eps: float = 1e-4
) -> Tensor:
    """Return A_t = sum of the normalised step scores at t and later (GRPO, process supervision).

    Without step scores it is `group_normalized`. With them all other inputs are ignored, so a KL
    in the reward would be lost.
    """
    if inputs.step_scores is None:
        return estimate_group_normalized(inputs, scale_rewards_eps=scale_rewards_eps)
    assert inputs.step_mask is not None  # the two come together
    groups = inputs.groups[inputs.rows]
    return per_group.process_group_normalized(
        inputs.step_scores, inputs.step_mask, groups, inputs.mask, scale_rewards_eps
    )


def estimate_leave_one_out(inputs: AdvantageInputs) -> Tensor:
    """Return A_i = s_i - mean of the other scores of its group, at every token; unbiased (RLOO)."""
    columns = inputs.scores.unbind(1)
    return inputs.per_token(
        torch.stack([per_group.leave_one_out(c, inputs.groups) for c in columns]).sum(0)
    )


# ------------------------------------------------------------------------ returns and a baseline


def returns(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t, without a baseline; unbiased (Williams 1992)."""
    return per_token.discounted_returns(inputs.rewards, inputs.mask, gamma)


def total_returns(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_0, the return of the whole completion; unbiased (Williams 1992).

        sum_t grad log pi(y_t) sum_i gamma^i r_i

    This is the original form of the policy gradient. Rewards before a token are only noise for it;
    `returns` leaves them out. With gamma below 1 this is still the gradient of E[G_0].
    """
    to_go = returns(inputs, gamma=gamma)
    first = inputs.mask.int().argmax(1, keepdim=True)
    return inputs.over_tokens(to_go.gather(1, first).squeeze(1))


def returns_minus_others(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - mean score of the *other* rows of the batch; unbiased (Kool 2019)."""
    everyone = torch.zeros_like(inputs.groups)
    columns = inputs.scores.unbind(1)
    above_others = torch.stack([per_group.leave_one_out(c, everyone) for c in columns]).sum(0)
    baseline = inputs.scores.nansum(1) - above_others
    return returns(inputs, gamma=gamma) - inputs.per_token(baseline)


def returns_minus_mean(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - mean score of the N rows, its own among them (Williams 1992).

    Counting its own score shrinks the expected gradient by 1 - 1/N.
    """
    scores = inputs.scores
    baseline = torch.where(scores.isnan(), 0.0, scores.nanmean(0, keepdim=True)).sum(1)
    return returns(inputs, gamma=gamma) - inputs.per_token(baseline)


def returns_minus_moving_average(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - moving average of *earlier* steps' scores; unbiased (Williams 1992).

    The average must not contain this step's own scores yet.
    """
    baseline = inputs.rewards.new_full(inputs.rewards.shape[:1], inputs.moving_average)
    return returns(inputs, gamma=gamma) - inputs.over_tokens(baseline)


def returns_minus_greedy(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - score of the greedy completion of the prompt; unbiased (ReMax; Li 2023).

    A source that does not apply to the row or to the greedy completion is left out of the baseline.
    """
    assert inputs.greedy_scores is not None  # the trainer scores a greedy completion for it
    own = inputs.scores[inputs.rows]
    baseline = torch.where(own.isnan(), 0.0, inputs.greedy_scores).nansum(1)
    return returns(inputs, gamma=gamma) - inputs.over_tokens(baseline)


def returns_minus_optimal(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - length-weighted mean score of the others of the group; unbiased (OPO).

    The baseline estimates the constant of least variance, with |grad log pi|^2 taken to be
    proportional to length (see `optimal_baseline`). Where every prompt has one completion, the
    others are those of the batch. Otherwise a row that is alone in its group has baseline 0, not
    advantage 0.
    """
    groups = inputs.groups
    if len(torch.unique(groups)) == len(groups):
        groups = torch.zeros_like(groups)
    columns = inputs.scores.unbind(1)
    baselines = [per_group.optimal_baseline(c, inputs.action_tokens, groups) for c in columns]
    return returns(inputs, gamma=gamma) - inputs.per_token(torch.stack(baselines).sum(0))


# ------------------------------------------------------------------------------- with a critic


def returns_minus_values(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Tensor:
    """Return A_t = G_t - V_t, which is unbiased however wrong V is (VPG; Sutton et al. 2000).

    A truncated row ends with `bootstrap_value`, and is as biased as that value is wrong.
    """
    return estimate_gae(inputs, gamma=gamma, lam=1.0)


def estimate_n_step(
    inputs: AdvantageInputs, *, gamma: float = 1.0, n_steps: int | None = 1
) -> Tensor:
    """Return A_t = r_t + ... + gamma^n V_{t+n} - V_t (A2C; Mnih et al. 2016, section 4).

    With n = 1 that is online A2C, with None it runs to the end of the row. It is as biased as
    V_{t+n} is wrong.
    """
    assert inputs.values is not None  # the config lets only trainers with a critic choose it
    return per_token.n_step(
        inputs.rewards, inputs.values, inputs.mask, n_steps, gamma, inputs.bootstrap_value
    )[0]


def estimate_gae(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_alpha: float | None = None,
) -> Tensor:
    """Return A_t = delta_t + gamma lam A_{t+1} (GAE; Schulman et al. 2016).

    It takes the critic's values and the row's own rewards only.

    With `lam_alpha`, lam is 1 - 1 / (lam_alpha length) in every row (VAPO) and `lam` is not used.
    """
    assert inputs.values is not None  # the config lets only trainers with a critic choose it
    mask = inputs.mask
    row_lam = lam if lam_alpha is None else per_token.length_adaptive_lam(mask, lam_alpha)
    return per_token.gae(
        inputs.rewards, inputs.values, mask, gamma, row_lam, inputs.bootstrap_value
    )[0]


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "gae": estimate_gae,
    "group_normalized": estimate_group_normalized,
    "group_normalized_per_source": group_normalized_per_source,
    "leave_one_out": estimate_leave_one_out,
    "n_step": estimate_n_step,
    "process_group_normalized": estimate_process_group_normalized,
    "returns": returns,
    "returns_minus_greedy": returns_minus_greedy,
    "returns_minus_mean": returns_minus_mean,
    "returns_minus_moving_average": returns_minus_moving_average,
    "returns_minus_optimal": returns_minus_optimal,
    "returns_minus_others": returns_minus_others,
    "returns_minus_values": returns_minus_values,
    "total_returns": total_returns,
}
