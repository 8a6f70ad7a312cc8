"""Per-token policy and value losses, and the weights that make one number of them.

A loss returns (per_token, metrics), each (B,T): what is minimised at every token, and numbers to
average over the mask for the log. It knows nothing of aggregation or of other processes:
`loss = (per_token * token_weights(...)).sum()`, where the denominator of the weights counts the
whole optimizer step on every rank, so any split into micro-batches has the same gradient.

`POLICY_LOSSES` at the end names the losses that a config can choose. To add one, write a function
and give it a line there; its parameters beyond the first four are config keys of the same name.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

MAX_LOG_RATIO = 20.0

Loss = tuple[Tensor, dict[str, Tensor]]


def vanilla(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """-A_t log pi(y_t): minimising it follows E[sum_t A_t grad log pi(y_t)] (Williams 1992).

    Right for one update per rollout only; `old_logprobs` is not used. Shapes as in
    `clipped_surrogate`; no metrics.
    """
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return -advantages * torch.where(mask, logprobs, 0.0), {}


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """The negated objective of PPO (Schulman et al. 2017, Eq. 7), to be minimised.

        rho_t = pi(y_t) / pi_old(y_t)
        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t)

    Once rho_t has left the interval on the side that A_t pushes to, the gradient is exactly 0. At
    rho = 1 it is -A_t grad log pi(y_t).

    Args:
        logprobs, old_logprobs: (B,T) of the sampled tokens; only `logprobs` gets a gradient.
        advantages: (B,T) or (B,1).
        mask: (B,T) action tokens.
        epsilon_high: upper clip distance (DAPO's clip-higher); None means `epsilon`.

    Returns:
        per_token (B,T) and metrics: `clip_ratio/low_mean`, `clip_ratio/high_mean` and
        `clip_ratio/region_mean` (tokens cut off by the bound below, above, either), `ratio`,
        `approx_kl` (rho_t - 1 - log rho_t, whose mean estimates KL(pi_old || pi)), and
        `ratio_overflow` (tokens whose |log rho_t| was held at 20 to keep the loss finite).
    """
    low_bound = 1 - epsilon
    high_bound = 1 + (epsilon if epsilon_high is None else epsilon_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    held = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = held.exp()
    clipped = ratio.clamp(low_bound, high_bound)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    low = (ratio < low_bound) & (advantages < 0)
    high = (ratio > high_bound) & (advantages > 0)
    hits = {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
        "ratio_overflow": log_ratio.abs() > MAX_LOG_RATIO,
    }
    metrics = {name: hit.to(per_token.dtype) for name, hit in hits.items()}
    metrics["ratio"] = torch.where(mask, ratio.detach(), 0.0)
    metrics["approx_kl"] = (torch.expm1(held) - held).detach()
    return per_token, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = None,
) -> Loss:
    """Squared error of the critic, optionally with the value clipping of OpenAI's baselines.

        V_c = V_old + clip(V - V_old, -clip_range, clip_range)
        loss_t = 1/2 max((V - R)^2, (V_c - R)^2)

    The max keeps a gradient when V has moved away from R, where V_c alone would be stuck.

    Args:
        values, old_values, returns: (B,T); only `values` gets a gradient.
        clip_range: None: 1/2 (V - R)^2.

    Returns:
        per_token (B,T) and the metric `value_clip_ratio`, the tokens where the clipped term won.
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


def token_weights(
    mask: Tensor,
    aggregation: str,
    max_completion_length: int | None = None,
    denominator: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight of every token in the loss, (B,T), 0 where masked.

        token_mean     1 / sum of mask        every token counts the same (DAPO)
        sequence_mean  1 / (N len_i)          every completion counts the same (GRPO)
        constant       1 / (N max_length)     no length in it at all: the unbiased one (Dr. GRPO)

    N is the number of rows with a True slot.

    Args:
        mask: (B,T) action tokens.
        max_completion_length: for "constant".
        denominator: the count over the whole optimizer step and all ranks, of tokens for
            "token_mean" and of rows otherwise (see `weight_count`); by default that of `mask`.
        dtype: of the result; by default torch's default dtype.

    Raises:
        ValueError: an unknown aggregation, or "constant" without `max_completion_length`.
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


POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "clipped_surrogate": clipped_surrogate,
}
