"""Policy losses per token: what a config chooses from, without a clip and with one.

`POLICY_LOSSES` at the end names them. To add one, write a function and give it a line there; its
parameters beyond the first four are config keys of the same name (`groups`, of `p3o`, is the
batch's).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pg.masking import masked_mean, widen

SAMPLING_LEVELS = ("token", "sequence")

MAX_LOG_RATIO = 20.0

Loss = tuple[Tensor, dict[str, Tensor]]


class _Start(NamedTuple):
    """What the losses with a ratio have in common, each (B,T) and 0 (the ratio 1) where masked."""

    log_ratio: Tensor  # held within +-MAX_LOG_RATIO
    ratio: Tensor
    advantages: Tensor  # detached
    metrics: dict[str, Tensor]


def _start(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, level: str = "token"
) -> _Start:
    """`level`: the ratio of the "token", or of its row: "sequence" (geometric mean), "product"."""
    tokens = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    log_ratio = tokens
    if level == "sequence":
        log_ratio = torch.where(mask, masked_mean(tokens, mask, dim=1)[:, None], 0.0)
    elif level == "product":
        log_ratio = torch.where(mask, _row_sum(tokens), 0.0)
    held = _held(log_ratio)
    ratio = held.exp()
    metrics = {
        "ratio_overflow": (log_ratio.abs() > MAX_LOG_RATIO).to(ratio.dtype),
        "ratio": torch.where(mask, ratio.detach(), 0.0),
        "approx_kl": _excess(_held(tokens)).detach(),
    }
    return _Start(held, ratio, torch.where(mask, advantages.detach(), 0.0), metrics)


def _held(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _excess(log_ratio: Tensor) -> Tensor:
    """rho - 1 - log rho: never negative, and its mean under pi_old is KL(pi_old || pi)."""
    return torch.expm1(log_ratio) - log_ratio


def _row_sum(tokens: Tensor) -> Tensor:
    return widen(tokens).sum(dim=1, keepdim=True).to(tokens.dtype)


def _bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)


def _clip_metrics(low: Tensor, high: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    low, high = low.to(dtype), high.to(dtype)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }


# -------------------------------------------------------------------------------- without a clip


def vanilla(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """-A_t log pi(y_t) (REINFORCE; Williams 1992).

        E[sum_t A_t grad log pi(y_t)] = grad J

    Unbiased while pi is the policy that sampled, so for one update per rollout only; from the
    second on it misses the weight rho. `old_logprobs` is not used.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.

    Returns:
        per_token (B,T), and no metrics.

    Elsewhere: a mean over the tokens of each completion, as in a well-known blog, weighs by
    1/length: another direction than grad J. That is the choice of `token_weights` here.
    """
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return -advantages * torch.where(mask, logprobs, 0.0), {}


def surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """-rho_t A_t, nothing clipped (conservative policy iteration; PPO, Eq. 6).

        grad = -rho_t A_t grad log pi(y_t)

    At rho = 1 that is REINFORCE, so with one update per rollout it is unbiased. Further away every
    token's own probability is corrected, but not that of the tokens before it: the gradient is
    that of choosing y_t by pi in states that pi_old visits.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of it.

    Elsewhere: GRPO code with one update per rollout writes rho as pi / sg(pi), which is this with
    old_logprobs = logprobs.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    return -start.ratio * start.advantages, start.metrics


def kl_penalty(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_kl_coef: float = 1.0,
) -> Loss:
    """The surrogate, less a penalty for leaving the old policy (PPO, Eq. 8).

        loss_t = -rho_t A_t + old_kl_coef (rho_t - 1 - log rho_t)

    The samples are of pi_old, so the penalty's expected gradient is exactly that of
    KL(pi_old || pi), of whole completions too; at rho = 1 every token's is 0, and what is left is
    REINFORCE.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        old_kl_coef: PPO's beta, which `rlhf_pg.control.PenaltyKLController` adapts.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of it.

    Elsewhere: a well-known blog writes KL(pi || pi_old), which is `mdpo`.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    penalty = old_kl_coef * _excess(start.log_ratio)
    return penalty - start.ratio * start.advantages, start.metrics


def mdpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_kl_coef: float = 1.0,
) -> Loss:
    """On-policy mirror descent (MDPO; Tomar et al. 2020): the KL of `kl_penalty`, turned round.

        loss_t = -rho_t A_t + old_kl_coef (rho_t log rho_t - rho_t + 1)

    The penalty's gradient is rho_t log rho_t grad log pi(y_t), in expectation exactly that of
    KL(pi || pi_old) in every state that pi_old visits, which is MDPO's objective; KL(pi || pi_old)
    of whole completions would weigh the states by pi. rho log rho alone has the same expected
    gradient, but not 0 at rho = 1, where this is REINFORCE token by token.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        old_kl_coef: 1 / t_k, one over MDPO's step size.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of it.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    penalty = old_kl_coef * (start.ratio * start.log_ratio - torch.expm1(start.log_ratio))
    return penalty - start.ratio * start.advantages, start.metrics


# ----------------------------------------------------------------------------------- with a clip


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
) -> Loss:
    """The negated objective of PPO (Schulman et al. 2017, Eq. 7), to be minimised.

        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t)
        with delta, where A_t < 0:  loss_t = -max(min(...), delta A_t)

    Once rho_t has left the interval on the side that A_t pushes to, the gradient is exactly 0, and
    so it is above delta where A_t < 0. At rho = 1 it is -A_t grad log pi(y_t).

    Args:
        logprobs, old_logprobs: (B,T) of the sampled tokens; only `logprobs` gets a gradient.
        advantages: (B,T) or (B,1).
        mask: (B,T) action tokens.
        epsilon_high: upper clip distance (DAPO's clip-higher); None means `epsilon`.
        delta: the highest rho_t where A_t < 0 (dual clip; Ye et al. 2020); None: no bound.
        importance_sampling_level: "sequence" takes one ratio for the row, exp(mean_t log rho_t)
            (GSPO, Zheng et al. 2025); with one advantage per row and the aggregation
            "sequence_mean" that is GSPO's objective. Its epsilon is far smaller: 3e-4.

    Returns:
        per_token (B,T) and metrics: `clip_ratio/low_mean`, `clip_ratio/high_mean` and
        `clip_ratio/region_mean` (tokens cut off by the bound below, above, either),
        `clip_ratio/delta_mean` (by delta, where it is given), `ratio`, `approx_kl`
        (rho_t - 1 - log rho_t of the token, whose mean estimates KL(pi_old || pi)), and
        `ratio_overflow` (tokens whose |log rho_t| was held at 20 to keep the loss finite).

    Raises:
        ValueError: an unknown level, or delta not above 1.

    Elsewhere: TRL caps rho_t at delta before the minimum, the same for delta >= 1 + epsilon; verl
    always has one, by default 3. TRL's PPO logs (log rho_t)^2 / 2 as approx_kl and averages it over
    padding too, Spinning Up logs -log rho_t.
    """
    if importance_sampling_level not in SAMPLING_LEVELS:
        level, known = importance_sampling_level, ", ".join(SAMPLING_LEVELS)
        raise ValueError(f"importance_sampling_level must be one of {known}, got {level!r}")
    if delta is not None and delta <= 1:
        raise ValueError(f"delta must be above 1, the ratio before the first update, got {delta}")
    start = _start(logprobs, old_logprobs, advantages, mask, importance_sampling_level)
    _, ratio, advantages, metrics = start
    low_bound, high_bound = _bounds(epsilon, epsilon_high)
    clipped = ratio.clamp(low_bound, high_bound)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < low_bound) & (advantages < 0)
    high = (ratio > high_bound) & (advantages > 0)
    metrics = _clip_metrics(low, high, per_token.dtype) | metrics
    if delta is not None:
        capped = per_token.minimum(-delta * advantages)
        per_token = torch.where(advantages < 0, capped, per_token)
        metrics["clip_ratio/delta_mean"] = ((ratio > delta) & (advantages < 0)).to(per_token.dtype)
    return per_token, metrics


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """Clips the weight, not the token (CISPO; MiniMax-M1, 2025, Eq. 4 and 5).

        loss_t = -sg(clip(rho_t, 1 - epsilon, 1 + epsilon_high)) A_t log pi(y_t)

    The gradient is that of `surrogate` with the weight rho_t clipped: no token loses its gradient.
    At rho = 1 it is REINFORCE's.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        epsilon: 1 for no lower bound, as in the paper's experiments.
        epsilon_high: None means `epsilon`.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`, where `clip_ratio/*` count the
        tokens whose weight was clipped, whatever the sign of A_t.

    Elsewhere: TRL has the upper bound alone and takes its epsilon_high as that bound itself, so its
    5.0 is epsilon = 1, epsilon_high = 4.0 here.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    low_bound, high_bound = _bounds(epsilon, epsilon_high)
    weight = start.ratio.detach().clamp(low_bound, high_bound)
    per_token = -weight * start.advantages * torch.where(mask, logprobs, 0.0)
    low, high = start.ratio < low_bound, start.ratio > high_bound
    return per_token, _clip_metrics(low, high, per_token.dtype) | start.metrics


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """The geometric mean of a row's clipped ratios (GMPO; Zhao et al. 2025, arXiv 2507.20673).

        c_t = min(log rho_t, epsilon_high) where A > 0, max(log rho_t, -epsilon) where A < 0
        loss = -A exp(mean_t c_t), the same at every token of the row

    The gradient is that of -A exp(mean_t c_t) mean_t log pi(y_t), a clipped token's being exactly
    0. At rho = 1 and with the aggregation "sequence_mean", the paper's, it is REINFORCE's.

    Args:
        logprobs, old_logprobs, mask: as in `clipped_surrogate`.
        advantages: (B,1), or (B,T) equal along a row.
        epsilon: in log space: rho_t is clipped to [exp(-epsilon), exp(epsilon_high)]. The paper
            takes 0.4, since one outlier weighs less in a geometric mean.
        epsilon_high: None means `epsilon`.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`, `ratio` being the token's.

    Elsewhere: TRL and verl have it in this form, verl with a small constant in the length.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    upper = epsilon if epsilon_high is None else epsilon_high
    low = (start.log_ratio < -epsilon) & (start.advantages < 0)
    high = (start.log_ratio > upper) & (start.advantages > 0)
    inside = start.log_ratio.clamp(-epsilon, upper)
    clipped = torch.where(low | high, inside, start.log_ratio)
    mean = masked_mean(clipped, mask, dim=1)[:, None].exp()
    per_token = -mean * start.advantages
    return per_token, _clip_metrics(low, high, per_token.dtype) | start.metrics


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Loss:
    """A soft gate in place of the clip (SAPO; Gao et al. 2025).

        loss_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t

    The gradient is that of `surrogate` times the gate 4 s (1 - s), s being the sigmoid: 1 at
    rho = 1, and less on either side, whatever the sign of A_t. With rho_t in it, a token that has
    become up to 3.4 times as likely still counts for more than at rho = 1 (tau = 1).

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        sapo_temperature_pos, sapo_temperature_neg: tau where A_t > 0, and elsewhere; a higher one
            closes sooner.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of
        `clipped_surrogate`.

    Elsewhere: TRL has it in this form.
    """
    start = _start(logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(start.ratio, sapo_temperature_neg)
    tau = tau.masked_fill(start.advantages > 0, sapo_temperature_pos)
    gate = torch.sigmoid(tau * (start.ratio - 1)) * 4 / tau
    return -gate * start.advantages, start.metrics


def p3o(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """Every row against the others of its prompt (P3O, clipped separately; Wu et al. 2023).

        rho_i = prod_t rho_t of row i,   q_ij = sg(rho_j) (r_i - r_j)
        c_i = clip(rho_i, 1 - epsilon, 1 + epsilon_high)
        loss_i = -1/(n-1) sum_{j != i} min(rho_i q_ij, c_i q_ij)

    shared evenly among the tokens of row i. A constant added to the scores of a prompt changes
    nothing. At rho = 1 the gradient is RLOO's; without a clip it stays unbiased when pi has moved
    away from pi_old, since rho_i is that of the whole row.

    Args:
        logprobs, old_logprobs, mask: as in `clipped_surrogate`. A row without a True slot is in no
            pair.
        advantages: (B,1), or (B,T) equal along a row: r_i, or r_i less any number of its group's
            own, as `group_normalized` with scale "none" has it (`leave_one_out` stretches the
            differences by n/(n-1)).
        groups: (B,) ids; a group has to be in the batch as a whole. Alone in its group, a row has
            loss 0.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`, `ratio` being the row's; the
        `clip_ratio/*` are the share of a row's pairs that are cut off.

    Elsewhere: the authors' code also clips the detached rho_j, to [1/c, c]; their "V2" clips
    log rho_i - log rho_j instead.
    """
    start = _start(logprobs, old_logprobs, advantages, mask, "product")
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    first = mask.int().argmax(dim=1, keepdim=True)
    rho, score = (x.gather(1, first) for x in (start.ratio, start.advantages))
    share = _pair_shares(groups, mask, rho.dtype)
    gap = rho.detach().T * (score - score.T) * share
    low_bound, high_bound = _bounds(epsilon, epsilon_high)
    clipped = rho.clamp(low_bound, high_bound)
    loss = -torch.min(rho * gap, clipped * gap).sum(dim=1, keepdim=True)
    cut = [(rho < low_bound) & (gap < 0), (rho > high_bound) & (gap > 0)]
    low, high = (torch.where(mask, (x * share).sum(dim=1, keepdim=True), 0.0) for x in cut)
    metrics = _clip_metrics(low, high, rho.dtype) | start.metrics
    return torch.where(mask, loss / lengths, 0.0), metrics


def _pair_shares(groups: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,B): 1/(n-1) where j is another of the n rows of i's group that have a True slot."""
    rows = mask.any(dim=1)
    pairs = (groups[:, None] == groups) & rows[:, None] & rows
    pairs.fill_diagonal_(False)
    return pairs.to(dtype) / pairs.sum(dim=1, keepdim=True).clamp(min=1)


POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "surrogate": surrogate,
    "kl_penalty": kl_penalty,
    "mdpo": mdpo,
    "clipped_surrogate": clipped_surrogate,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "p3o": p3o,
}
