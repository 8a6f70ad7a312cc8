"""MDPO, on-policy (Tomar et al. 2020, arXiv 2005.09814): a policy loss of one's own, which has a
name for YAML and flags once it is in `POLICY_LOSSES`.

    python examples/mdpo.py --task arithmetic --max_completion_length 6 --num_iterations 4

Deviations: advantages from the other completions of the prompt in place of a critic's; 1 / t_k
stays as it is, where the paper lets it grow over the run; the KL is estimated from sampled tokens.
"""

import sys

import torch
from torch import Tensor

from rlhf_pg import RLOOConfig, RLOOTrainer
from rlhf_pg.config import parse
from rlhf_pg.losses import POLICY_LOSSES, Loss, ratio_terms


def mdpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_kl_coef: float = 1.0,
) -> Loss:
    """Compute the loss of on-policy mirror descent (MDPO; Tomar et al. 2020).

        loss_t = -rho_t A_t + old_kl_coef (rho_t log rho_t - rho_t + 1)

    This is `kl_penalty` with the KL reversed. The penalty's gradient is rho_t log rho_t grad log
    pi(y_t), in expectation exactly that of KL(pi || pi_old) in every state that pi_old visits,
    which is MDPO's objective; KL(pi || pi_old) of whole completions would weigh the states by pi.
    rho log rho alone has the same expected gradient, but is not 0 at rho = 1, where this loss is
    REINFORCE token by token.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_surrogate`.
        old_kl_coef: 1 / t_k, one over MDPO's step size.

    Returns:
        per_token (B,T) and the metrics `ratio`, `approx_kl` and `ratio_overflow` of
        `clipped_surrogate`.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    penalty = old_kl_coef * (terms.ratio * terms.log_ratio - torch.expm1(terms.log_ratio))
    return penalty - terms.ratio * terms.advantages, terms.metrics


if __name__ == "__main__":
    POLICY_LOSSES["mdpo"] = mdpo
    args = parse(RLOOConfig, ["--policy_loss", "mdpo", *sys.argv[1:]])
    RLOOTrainer(args=args).train()
