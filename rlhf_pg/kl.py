"""Per-token estimates of KL(policy || reference), and controllers for its coefficient.

Throughout, u = log pi(y_t) - log pi_ref(y_t) for a token y_t that the policy sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """One sample's estimate of KL(pi || pi_ref), elementwise, differentiable and never clamped.

        k1 = u                unbiased, may be negative
        k2 = u^2 / 2          biased, small variance
        k3 = exp(-u) - 1 + u  unbiased, never negative

    (Schulman 2020, "Approximating KL divergence".) The *value* says nothing of the *gradient*: on
    policy and differentiated as a loss, the expected gradient of k1 is 0, that of k2 is
    grad KL(pi || pi_ref), that of k3 is grad KL(pi_ref || pi). As a detached penalty in the reward,
    k1 is the one whose policy gradient is that of KL(pi || pi_ref).

    Args:
        logprobs, ref_logprobs: any equal shapes.
        estimator: "k1", "k2" or "k3".

    Raises:
        ValueError: another estimator.
    """
    u = logprobs - ref_logprobs
    if estimator == "k1":
        return u
    if estimator == "k2":
        return u**2 / 2
    if estimator == "k3":
        return torch.expm1(-u) + u
    raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")


@dataclass
class AdaptiveKLController:
    """Moves the KL coefficient in proportion to the error (Ziegler et al. 2019, section 2.2).

        e = clip(kl / target - 1, -0.2, 0.2),  coef <- coef * (1 + e * num_samples / horizon)

    `kl` is the mean over completions of the summed k1; `horizon` is counted in completions.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon


@dataclass
class PenaltyKLController:
    """The adaptive penalty of PPO (Schulman et al. 2017, section 4).

    coef <- coef / 2 if kl < target / 1.5;  coef <- 2 * coef if kl > 1.5 * target
    """

    coef: float
    target: float

    def update(self, kl: float) -> None:
        if kl < self.target / 1.5:
            self.coef /= 2
        elif kl > self.target * 1.5:
            self.coef *= 2
