"""Per-token policy losses without a clip."""

import torch
from torch import Tensor

from rlhf_pg.losses.ratio import Loss, excess, ratio_terms


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

    At rho = 1 this is REINFORCE, so with one update per rollout it is unbiased. Further away, every
    token's own probability is corrected, but not that of the tokens before it: the gradient is that
    of choosing y_t by pi in states that pi_old visits.

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
