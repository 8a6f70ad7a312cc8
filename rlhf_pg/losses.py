"""Per-token policy and value losses, and the weights that sum them to one number.

A loss returns (per_token, metrics), each (B,T): the loss to minimise at every token, and numbers to
average over the mask for the log. It does not depend on aggregation or other processes: `loss =
(per_token * token_weights(...)).sum()`, where the denominator of the weights counts the whole
optimizer step on all ranks, so any split into micro-batches has the same gradient.

Throughout, rho_t = pi(y_t) / pi_old(y_t) for a token y_t that pi_old sampled, and sg stops the
gradient. Masked slots may hold anything, NaN included, and are 0 in the output.

The key `policy_loss` selects a function in `POLICY_LOSSES`. Its parameters after the first four are
config keys of the same name.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pg.masking import masked_mean, widen

SAMPLING_LEVELS = ("token", "sequence")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
MAX_LOG_RATIO = 20.0
SQUARE = "sampling/importance_sampling_ratio/square"  # from which the effective sample size comes

Loss = tuple[Tensor, dict[str, Tensor]]


# ------------------------------------------------------------------------------------ policy losses


class RatioTerms(NamedTuple):
    """The terms shared by the losses with a ratio, each (B,T) and 0 (the ratio 1) where masked."""

    log_ratio: Tensor  # held within +-MAX_LOG_RATIO
    ratio: Tensor
    advantages: Tensor  # detached
    metrics: dict[str, Tensor]


def ratio_terms(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, level: str = "token"
) -> RatioTerms:
    """Compute the ratio of the "token", or of its row: "sequence" (geometric mean)."""
    tokens = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    log_ratio = tokens
    if level == "sequence":
        log_ratio = torch.where(mask, masked_mean(tokens, mask, dim=1)[:, None], 0.0)
    bounded = clamp_log_ratio(log_ratio)
    ratio = bounded.exp()
    metrics = {
        "ratio_overflow": (log_ratio.abs() > MAX_LOG_RATIO).to(ratio.dtype),
        "ratio": torch.where(mask, ratio.detach(), 0.0),
        "approx_kl": excess(clamp_log_ratio(tokens)).detach(),
    }
    return RatioTerms(bounded, ratio, torch.where(mask, advantages.detach(), 0.0), metrics)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def excess(log_ratio: Tensor) -> Tensor:
    """Return rho - 1 - log rho, never negative and with the mean KL(pi_old || pi) under pi_old."""
    return torch.expm1(log_ratio) - log_ratio


def bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)


def clip_metrics(low: Tensor, high: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    low = low.to(dtype)
    high = high.to(dtype)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }


def vanilla(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """Compute -A_t log pi(y_t) (REINFORCE; Williams 1992).

        E[sum_t A_t grad log pi(y_t)] = grad J

    It is unbiased while pi is the policy that sampled, so for one update per rollout only; from the
    second update on, the weight rho is missing. `old_logprobs` is not used.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.

    Returns:
        per_token (B,T), and no metrics.

    Elsewhere: a mean over the tokens of each completion, as in a well-known blog, weighs
    completions by 1/length, which is not the direction of grad J. Here `token_weights` makes that
    choice.
    """
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return -advantages * torch.where(mask, logprobs, 0.0), {}


def surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """Compute -rho_t A_t, without a clip (conservative policy iteration; PPO, Eq. 6).

        grad = -rho_t A_t grad log pi(y_t)

    At rho = 1 this is REINFORCE, so with one update per rollout it is unbiased. Off policy, each
    token's own probability is corrected for, but not that of the tokens before it: the gradient is
    that of choosing y_t by pi in states that pi_old visits.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of
        `clipped_surrogate`.

    Elsewhere: GRPO code with one update per rollout writes rho as pi / sg(pi), which is this loss
    with old_logprobs = logprobs.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    return -terms.ratio * terms.advantages, terms.metrics


def kl_penalty(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_kl_coef: float = 1.0,
) -> Loss:
    """Compute the surrogate plus a penalty for leaving the old policy (PPO, Eq. 8).

        loss_t = -rho_t A_t + old_kl_coef (rho_t - 1 - log rho_t)

    The samples come from pi_old, so the penalty's expected gradient is exactly that of KL(pi_old ||
    pi), over whole completions too. At rho = 1 every token's penalty gradient is 0, and REINFORCE
    is left.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        old_kl_coef: PPO's beta, which `rlhf_pg.kl.PenaltyKLController` adapts.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of
        `clipped_surrogate`.

    Elsewhere: a well-known blog writes KL(pi || pi_old), which is MDPO's (examples/mdpo.py).
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    penalty = old_kl_coef * excess(terms.log_ratio)
    return penalty - terms.ratio * terms.advantages, terms.metrics


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
    """Compute the negated clipped objective of PPO, to be minimised (Schulman et al. 2017, Eq. 7).

        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t)
        with delta, where A_t < 0:  loss_t = -max(min(...), delta A_t)

    Once rho_t has left the interval on the side that A_t pushes towards, the gradient is exactly 0;
    where A_t < 0 it is also 0 above delta. At rho = 1 it is -A_t grad log pi(y_t).

    Args:
        logprobs, old_logprobs: (B,T) of the sampled tokens; only `logprobs` gets a gradient.
        advantages: (B,T) or (B,1).
        mask: (B,T) action tokens.
        epsilon_high: upper clip distance (DAPO's clip-higher); None means `epsilon`.
        delta: the highest rho_t where A_t < 0 (dual clip; Ye et al. 2020); None sets no bound.
        importance_sampling_level: "sequence" takes one ratio for the row, exp(mean_t log rho_t)
            (GSPO, Zheng et al. 2025). With one advantage per row and the aggregation
            "sequence_mean", this is GSPO's objective. Its epsilon is far smaller: 3e-4.

    Returns:
        per_token (B,T) and metrics: `clip_ratio/low_mean`, `clip_ratio/high_mean` and
        `clip_ratio/region_mean` (tokens cut off by the lower bound, the upper bound, either),
        `clip_ratio/delta_mean` (tokens cut off by delta, if it is given), `ratio`, `approx_kl`
        (rho_t - 1 - log rho_t of the token, whose mean estimates KL(pi_old || pi)), and
        `ratio_overflow` (tokens whose |log rho_t| was limited to 20 to keep the loss finite).

    Raises:
        ValueError: the level is unknown, or delta is not above 1.

    Elsewhere: TRL caps rho_t at delta before the minimum, which is the same for delta >= 1 +
    epsilon; verl always has a delta, by default 3. TRL's PPO logs (log rho_t)^2 / 2 as approx_kl
    and averages it over padding too; Spinning Up logs -log rho_t.
    """
    if importance_sampling_level not in SAMPLING_LEVELS:
        level = importance_sampling_level
        known = ", ".join(SAMPLING_LEVELS)
        raise ValueError(f"importance_sampling_level must be one of {known}, got {level!r}")
    if delta is not None and delta <= 1:
        raise ValueError(f"delta must be above 1, the ratio before the first update, got {delta}")
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask, importance_sampling_level)
    _, ratio, advantages, metrics = terms
    low_bound, high_bound = bounds(epsilon, epsilon_high)
    clipped = ratio.clamp(low_bound, high_bound)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < low_bound) & (advantages < 0)
    high = (ratio > high_bound) & (advantages > 0)
    metrics = clip_metrics(low, high, per_token.dtype) | metrics
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
    """Clip the weight of a token instead of the token (CISPO; MiniMax-M1, 2025, Eq. 4 and 5).

        loss_t = -sg(clip(rho_t, 1 - epsilon, 1 + epsilon_high)) A_t log pi(y_t)

    The gradient is that of `surrogate` with the weight rho_t clipped, so no token loses its
    gradient. At rho = 1 it is REINFORCE's.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        epsilon: 1 for no lower bound, as in the paper's experiments.
        epsilon_high: None means `epsilon`.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`, where `clip_ratio/*` count the
        tokens whose weight was clipped, whatever the sign of A_t.

    Elsewhere: TRL has only the upper bound and takes its epsilon_high as that bound itself, so its
    5.0 is epsilon = 1, epsilon_high = 4.0 here.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    low_bound, high_bound = bounds(epsilon, epsilon_high)
    weight = terms.ratio.detach().clamp(low_bound, high_bound)
    per_token = -weight * terms.advantages * torch.where(mask, logprobs, 0.0)
    low = terms.ratio < low_bound
    high = terms.ratio > high_bound
    return per_token, clip_metrics(low, high, per_token.dtype) | terms.metrics


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Loss:
    """Compute the policy loss with a soft gate in place of the clip (SAPO; Gao et al. 2025).

        loss_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t

    The gradient is that of `surrogate` times the gate 4 s (1 - s), where s is the sigmoid: 1 at rho
    = 1, and less on either side, whatever the sign of A_t. Since the gradient also contains rho_t,
    a token that has become up to 3.4 times as likely still counts for more than at rho = 1 (tau =
    1).

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        sapo_temperature_pos, sapo_temperature_neg: tau where A_t > 0, and elsewhere; a higher tau
            closes the gate sooner.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of
        `clipped_surrogate`.

    Elsewhere: TRL has the same form.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(terms.ratio, sapo_temperature_neg)
    tau = tau.masked_fill(terms.advantages > 0, sapo_temperature_pos)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return -gate * terms.advantages, terms.metrics


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """Clip by the change of a token's probability (DPPO, binary TV; Qi et al. 2026, 2602.04879).

        loss_t = -M_t rho_t A_t
        M_t    = 0  where A_t > 0 and pi(y_t) - pi_old(y_t) > epsilon_high
                 0  where A_t < 0 and pi_old(y_t) - pi(y_t) > epsilon
                 1  elsewhere

    |pi(y_t) - pi_old(y_t)| is the total variation of the two policies' choices between y_t and all
    other tokens. Where `clipped_surrogate` stops a rare token at a ratio that hardly changes the
    policy, this lets it rise; a likely token it stops earlier. At rho = 1 it is REINFORCE.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        epsilon: the largest fall of a probability; 0.15 in the authors' runs.
        epsilon_high: the largest rise; None means `epsilon`.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`.

    Elsewhere: prime-rl has this form and adds 1e-3 (log rho_t)^2; verl bounds rho_t, by default at
    20. There and in the paper pi_old may be the engine's; here it is the trainer's, and
    `sampler_correction` is for the difference.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    rise = torch.where(mask, logprobs.detach().exp() - old_logprobs.detach().exp(), 0.0)
    low = (rise < -epsilon) & (terms.advantages < 0)
    high = (rise > (epsilon if epsilon_high is None else epsilon_high)) & (terms.advantages > 0)
    per_token = torch.where(low | high, 0.0, -terms.ratio * terms.advantages)
    return per_token, clip_metrics(low, high, per_token.dtype) | terms.metrics


def none(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """Return a loss of 0, (B,T), for a policy that learns from a teacher alone; no metrics."""
    return torch.where(mask, logprobs, 0.0) * 0.0, {}


POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "surrogate": surrogate,
    "kl_penalty": kl_penalty,
    "clipped_surrogate": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "none": none,
}


def high_entropy(entropies: Tensor, everyone: Tensor, share: float) -> Tensor:
    """Select the tokens with the highest entropies (80/20 rule; Wang et al. 2025, 2506.01939).

        H_t >= tau,   tau the k-th highest of the step's N entropies, k = floor(share (N-1)) + 1

    The policy loss is 0 at all other tokens, and its denominator still counts them. Where only
    rounding puts a token below tau (the first tokens of a group have one entropy), it is kept.

    Args:
        entropies: (B,T) of the policy before the updates.
        everyone: (N,) those of the trained tokens of the step, on all ranks.
        share: `top_entropy_quantile`.

    Returns:
        (B,T) bool.

    Elsewhere: TRL has the same k, but a threshold per micro-batch, from the policy as it is in each
    update; its entropy bonus is limited to these tokens too.
    """
    if not len(everyone):
        return torch.zeros_like(entropies, dtype=torch.bool)
    lower = len(everyone) - 1 - int(share * (len(everyone) - 1))
    return entropies >= (1 - 1e-5) * everyone.kthvalue(1 + lower).values


# ------------------------------------------------------------------ value loss, NLL of other tokens


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = None,
) -> Loss:
    """Compute the critic's squared error, optionally with value clipping (OpenAI baselines, ppo2).

        V_c = V_old + clip(V - V_old, -clip_range, clip_range)
        loss_t = 1/2 max((V - R)^2, (V_c - R)^2)

    The gradient is V - R, but exactly 0 where V has moved by more than clip_range and is nearer to
    R than V_c is.

    Args:
        values, old_values, returns: (B,T); only `values` gets a gradient.
        clip_range: None means no clipping: 1/2 (V - R)^2.

    Returns:
        per_token (B,T) and the metric `value_clip_ratio`, the tokens where the clipped term won.

    Elsewhere: skrl has V_c alone, which gets stuck where V has moved away from R.
    """
    values = torch.where(mask, values, 0.0)
    returns = torch.where(mask, returns.detach(), 0.0)
    squares = (values - returns) ** 2
    if clip_range is None:
        return 0.5 * squares, {}
    old_values = torch.where(mask, old_values.detach(), 0.0)
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped_squares = (clipped - returns) ** 2
    won = (clipped_squares > squares) & ((values - old_values).abs() > clip_range)
    return 0.5 * torch.max(squares, clipped_squares), {"value_clip_ratio": won.to(squares.dtype)}


def nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Compute the negative log-likelihood of some tokens (VAPO; ECHO; PPO-ptx, 2022, Eq. 2).

        loss_t = -log pi(y_t | x, y_<t)

    Over the completions that are correct (`positive_nll_coef`; VAPO, Yue et al. 2025, section 4.3)
    this is REINFORCE with a reward of 1 and no baseline, since they are samples of the policy
    itself. Over the words of tools and environments (`tool_output_nll_coef`; ECHO, Shrivastava et
    al. 2026, 2605.24517) the policy learns what its actions lead to, from failures too. Over other
    texts (`ptx_coef`; InstructGPT, Ouyang et al. 2022, Eq. 2) it preserves what the policy knew.
    Each is averaged over its tokens in the whole optimizer step, on all ranks.

    Args:
        logprobs: (B,T) of the policy.
        mask: (B,T) the tokens.

    Returns:
        (B,T), 0 in masked slots.

    Elsewhere: prime-rl's ECHO has the same mean; its coefficient is 0.1, and it can leave out the
    template's words around a tool's. InstructGPT's Eq. 2 sums the tokens of a text.
    """
    return -torch.where(mask, logprobs, 0.0)


# ------------------------------------------------------------------------ from tokens to one number


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
    count = weight_count(mask, aggregation) if denominator is None else denominator
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
    """Count these rows for the denominator of `token_weights`: tokens or rows."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}"
        )
    if aggregation == "token_mean":
        return mask.sum()
    return mask.any(dim=1).sum()


# ------------------------------------------------------------------------------- sampler correction


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

    Elsewhere: TRL has the same four modes; its default is "sequence_mask" with 3.0. IcePop, in
    slime and verl too, is "token_mask" with 0.5 and 5 (recipes/presets/icepop.yaml).
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

    The numbers are the weights (without a correction, the plain ratios), their squares, which of
    them a bound has changed, and the differences.

    Args:
        old_logprobs, sampler_logprobs, mask, clip_max, clip_min: as in `sampler_weights`.
        mode: a name in SAMPLER_CORRECTIONS, or "none".
    """
    level = "token" if mode == "none" else mode.split("_")[0]
    ratios = sampler_weights(old_logprobs, sampler_logprobs, mask, f"{level}_truncate", math.inf)
    plain = ratios
    if mode != "none":
        ratios = sampler_weights(old_logprobs, sampler_logprobs, mask, mode, clip_max, clip_min)
    difference = (old_logprobs - sampler_logprobs).abs()
    numbers = {f"sampling/importance_sampling_ratio/{x}": ratios for x in ("min", "mean", "max")}
    numbers |= {SQUARE: ratios.square(), "sampling/clipped_share": (ratios != plain).to(ratios)}
    numbers |= {f"sampling/sampling_logp_difference/{x}": difference for x in ("mean", "max")}
    return (None if mode == "none" else ratios), numbers
