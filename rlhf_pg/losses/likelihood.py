"""The likelihood of correct completions, as a loss beside that of the policy gradient."""

import torch
from torch import Tensor


def positive_nll(
    logprobs: Tensor, mask: Tensor, positive: Tensor, denominator: Tensor | float | None = None
) -> Tensor:
    """Compute the negative log-likelihood of correct rows (VAPO; Yue et al. 2025, section 4.3).

        L = -1 / (sum over T of |y_i|)  sum over i in T, t of log pi(y_it | x_i, y_i<t)

    where T is the set of correct completions. They are samples of the policy itself, so this is
    REINFORCE on them, with a reward of 1 and no baseline.

    Args:
        logprobs: (B,T) of the policy.
        mask: (B,T) action tokens.
        positive: (B,) bool, membership of T.
        denominator: number of tokens in T over the whole optimizer step and all ranks; by default
            that of `mask`.

    Returns:
        One number, 0 if no completion is correct.
    """
    right = mask & positive[:, None]
    count = right.sum() if denominator is None else torch.as_tensor(denominator)
    return -torch.where(right, logprobs, 0.0).sum() / count.to(logprobs).clamp(min=1)
