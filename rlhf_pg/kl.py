"""Estimates of KL(policy || reference) from sampled tokens, KL terms for a loss, and controllers.

Throughout, u = log pi(y_t) - log pi_ref(y_t) for a token y_t that the policy sampled, and pi_old is
the policy that sampled it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pg.advantages import discounted_returns
from rlhf_pg.losses import MAX_LOG_RATIO

KL_ESTIMATORS = ("k1", "k2", "k3")

KL_LOSSES = ("k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio")
DIVERGENCES = ("reverse_kl", "forward_kl", "js")

# exp of this is 0 in every dtype, and unlike for -inf, 0 times this is not NaN.
IMPOSSIBLE = -1e4


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_ref) from one sample (Schulman 2020, "Approximating KL divergence").

        k1 = u                unbiased, may be negative
        k2 = u^2 / 2          biased, small variance
        k3 = exp(-u) - 1 + u  unbiased, never negative

    The *value* says nothing about the *gradient*. Its expectation, on policy and at one prefix:

              differentiated as a loss    as a detached penalty in the reward
        k1    0                           grad KL(pi || pi_ref)
        k2    grad KL(pi || pi_ref)       grad E[k2] - grad KL(pi || pi_ref)
        k3    grad KL(pi_ref || pi)       grad KL(pi || pi_ref) - grad KL(pi_ref || pi)

    So k3 in the reward does almost nothing near the reference, where the two terms cancel: 2 % of
    the true gradient at logits 0.1 away. Over a completion, only k1 in the reward, summed from
    every token to the end, gives the gradient of the whole KL. As losses, k2 and k3 hold the
    prefixes fixed and leave out what an early token does to the KL of later ones.

    Args:
        logprobs, ref_logprobs: any equal shapes, in nats.
        estimator: "k1", "k2" or "k3".

    Returns:
        The estimates, elementwise, differentiable in both arguments and never clamped: k3 is inf
        where exp(-u) overflows, in float32 at u < -88.

    Raises:
        ValueError: the estimator is unknown.

    Elsewhere: verl and OpenRLHF clamp k3 at 10, so its gradient is exactly 0 for a token that has
    become 14 times less likely than in the reference, where it is needed most. TRL's PPO offers k3
    as a penalty in the reward.
    """
    u = logprobs - ref_logprobs
    if estimator == "k1":
        return u
    if estimator == "k2":
        return u**2 / 2
    if estimator == "k3":
        return torch.expm1(-u) + u
    raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")


def kl_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str
) -> Tensor:
    """Compute the KL as a loss term with the gradient that its name promises (Schulman 2020).

                             value     gradient, times grad log pi(y_t)
        k2                   u^2 / 2   u
        k3                   k3        1 - exp(-u)
        k2_straight_through  k3        u
        k3_ratio             rho k3    rho u                  (DeepSeek-V3.2, arXiv 2512.02556)
        k1_to_go             u         rho sum_{i >= t} u_i   (the policy gradient of k1)

    with rho = pi(y_t) / pi_old(y_t). The gradient rho u includes the derivative of rho itself: with
    rho detached, rho (1 - exp(-u)) would be left, at rho = 1 too.

    On policy and at one prefix, all but k3 follow KL(pi || pi_ref); k3 follows KL(pi_ref || pi).
    Over a completion only `k1_to_go` is exact, and only where the weights add the tokens up
    (aggregation "constant"); the others hold the prefixes fixed: sum_t E[grad KL_t], for prefixes
    from pi. Off policy, the two with rho stay exact at one prefix. The prefixes and the later u_i
    still come from pi_old, as in PPO's surrogate: the unbiased weights are products of rho over all
    tokens, whose variance grows exponentially with length. The losses without rho are weighted by
    pi_old throughout and follow no KL.

    Args:
        logprobs: (B,T) of the sampled tokens; only these get a gradient.
        old_logprobs: (B,T) of the policy that sampled them, read by "k1_to_go" and "k3_ratio" only.
        ref_logprobs: (B,T).
        mask: (B,T) action tokens; the u of other tokens is ignored.
        estimator: one of `KL_LOSSES`.

    Returns:
        (B,T), 0 where masked, to be multiplied by `beta`. |log rho| is limited to 20 in the
        weights, which scales a gradient and never stops it. Nothing else is clamped: where k3
        overflows (see `kl_estimate`), the value is inf; the gradient is inf only in "k3".

    Raises:
        ValueError: the estimator is unknown, or "k1", whose expected gradient is 0.

    Elsewhere: verl's "k3+" is `k2_straight_through`. TRL's GRPO uses `k3_ratio` if
    `use_bias_correction_kl` is set, and k3 otherwise; the `kl` it logs is then rho k3.
    """
    if estimator == "k1":
        raise ValueError(
            'estimator "k1" cannot be a loss, since its expected gradient is 0: use "k1_to_go", '
            "or put k1 in the reward"
        )
    if estimator not in KL_LOSSES:
        raise ValueError(f"estimator must be one of {', '.join(KL_LOSSES)}, got {estimator!r}")
    logprobs = torch.where(mask, logprobs, 0.0)
    ref_logprobs = torch.where(mask, ref_logprobs.detach(), 0.0)
    if estimator in ("k2", "k3"):
        return kl_estimate(logprobs, ref_logprobs, estimator)
    now = logprobs.detach()
    u = now - ref_logprobs
    k3 = kl_estimate(now, ref_logprobs, "k3")
    log_rho = torch.where(mask, now - old_logprobs.detach(), 0.0)
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    to_go = discounted_returns(u, mask)
    value, slope = {
        "k2_straight_through": (k3, u),
        "k3_ratio": (rho * k3, rho * u),  # autograd would have inf - inf where exp(-u) overflows
        "k1_to_go": (u, rho * to_go),
    }[estimator]
    return value + slope * (logprobs - now)


def divergence(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    kind: str = "reverse_kl",
    mixture: float = 0.5,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute how far p is from a teacher's q, and the gradient (GKD; Agarwal et al. 2024, Eq. 1).

        reverse_kl  D = KL(p || q)                         a_v = p_v log(p_v / q_v)
        forward_kl  D = KL(q || p)                         a_v = -q_v
        js          D = w KL(q || m) + (1 - w) KL(p || m)  a_v = (1 - w) p_v log(p_v / m_v)
                    m = w q + (1 - w) p

    With a_v = p_v dD/dp_v, up to a multiple of p_v, the gradient by the logits of p is

        dD/dz_v = a_v - p_v sum_u a_u

    Args:
        logprobs, teacher_logprobs: (...,V) log p and log q, finite.
        kind: a name in DIVERGENCES.
        mixture: w of "js", the share of the teacher.
        top_k: compare the teacher's most likely tokens one by one and all the others as one (the
            tail); D is then a lower bound. None compares all tokens.

    Returns:
        (...) and (...,V).

    Elsewhere: TRL's GKD has the same w as `beta`, where 0 is `forward_kl` and 1 is `reverse_kl`.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {kind!r}")
    if top_k is not None:
        best = teacher_logprobs.topk(min(top_k, logprobs.shape[-1])).indices

        def tail_of(x: Tensor) -> Tensor:
            others = x.scatter(-1, best, -torch.inf)
            return others.logsumexp(-1, keepdim=True).clamp(min=IMPOSSIBLE)

        tail = tail_of(logprobs)
        ours = torch.cat([logprobs.gather(-1, best), tail], dim=-1)
        theirs = torch.cat([teacher_logprobs.gather(-1, best), tail_of(teacher_logprobs)], dim=-1)
        distance, gradient = divergence(ours, theirs, kind, mixture)
        shares = (logprobs - tail).exp()  # of each token in the tail of p
        return distance, (shares * gradient[..., -1:]).scatter(-1, best, gradient[..., :-1])
    p = logprobs.exp()
    q = teacher_logprobs.exp()
    if kind == "forward_kl":
        distance = (q * (teacher_logprobs - logprobs)).sum(-1)
        slope = -q
    elif kind == "reverse_kl":
        slope = p * (logprobs - teacher_logprobs)
        distance = slope.sum(-1)
    else:
        log_m = torch.logaddexp(
            teacher_logprobs + math.log(mixture), logprobs + math.log1p(-mixture)
        )
        slope = (1 - mixture) * p * (logprobs - log_m)
        distance = mixture * (q * (teacher_logprobs - log_m)).sum(-1) + slope.sum(-1)
    return distance, slope - p * slope.sum(-1, keepdim=True)


@dataclass
class AdaptiveKLController:
    """A KL coefficient that changes in proportion to the error (Ziegler et al. 2019, section 2.2).

        e = clip(kl / target - 1, -0.2, 0.2),  coef <- coef * (1 + e * num_samples / horizon)

    `kl` is the mean over completions of the summed k1, in nats; `horizon` is counted in
    completions.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, num_samples: int) -> None:
        if kl != kl:
            return  # a NaN would stay in the coefficient, and in every checkpoint after it
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon


@dataclass
class PenaltyKLController:
    """The adaptive KL penalty of PPO (Schulman et al. 2017, section 4).

        coef <- coef / 2 if kl < target / 1.5;  coef <- 2 * coef if kl > 1.5 * target

    PPO measures `kl` after the updates that the coefficient has restrained.
    """

    coef: float
    target: float

    def update(self, kl: float) -> None:
        if kl < self.target / 1.5:
            self.coef /= 2
        elif kl > self.target * 1.5:
            self.coef *= 2


@dataclass
class KLAdaptiveRate:
    """Scale the learning rate to move the policy by about `target` (KLAdaptiveLR of skrl).

        coef <- max(coef / 1.5, 0.1)  if kl > 2 target
        coef <- min(coef * 1.5, 10)   if kl < target / 2

    `kl` estimates KL(pi_old || pi) per token, in nats, after the last update of a step: the mean of
    rho - 1 - log rho. `coef` multiplies the rate of the schedule.

    Elsewhere: skrl bounds the rate itself, by default to [1e-6, 1e-2], far above what a language
    model bears.
    """

    target: float
    coef: float = 1.0

    def update(self, kl: float) -> None:
        if kl > 2 * self.target:
            self.coef = max(self.coef / 1.5, 0.1)
        elif kl < self.target / 2:
            self.coef = min(self.coef * 1.5, 10.0)
