"""Advantages per token, from a row's own rewards and values, (B,T) throughout.

All of them are recursions from the last token to the first. `_scan` computes them in log2(T) steps;
a loop over the tokens would launch several GPU kernels for each.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the reward-to-go (Williams 1992; Sutton & Barto, 3.9).

        G_t = r_t + gamma G_{t+1}

    With gamma 1 the policy gradient is unbiased, whatever constant or value of the state before t
    is subtracted. A smaller gamma follows the gradient of a shorter-sighted objective.

    Args:
        rewards, mask: (B,T); rewards in False slots are ignored.

    Returns:
        (B,T).

    Elsewhere: verl's REINFORCE++ now has the same returns. Up to August 2026 (#7278) it started
    again at every hole of the mask, so tokens before a tool's output got no credit for what came
    after it.
    """
    returns = _scan(gamma, rewards.double(), mask)
    return torch.where(mask, returns, 0.0).to(rewards.dtype)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages (Schulman et al. 2016, Eq. 16; PPO Eq. 11 where truncated).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    With gamma 1 the policy gradient is unbiased at lam 1, and at any lam where V is exact.
    Otherwise a share 1 - lam of the critic's error about the next state remains in it.

    Args:
        rewards, values: (B,T); `values[:, t]` is V of the state *before* token t.
        mask: (B,T).
        lam: one for all rows, or (B,).
        bootstrap_value: (B,) V of the state after the last True slot of a truncated row, and 0
            where the episode terminated; None if all did.

    Returns:
        advantages (B,T), not whitened, and returns (B,T) = advantages + values.

    Elsewhere: skrl's documentation has a minus before gamma lam A_{t+1} (its code has the plus),
    and skrl adds gamma V_t instead of V_{t+1} where an episode was truncated. TRL's PPO paid the
    score one slot after EOS.
    """
    wide = values.double()
    lam = lam.to(wide)[:, None] if isinstance(lam, Tensor) else lam
    next_value = _next(_with_end(wide, bootstrap_value), mask)
    delta = rewards + gamma * next_value - wide
    running = _scan(gamma * lam, delta, mask)
    advantages = torch.where(mask, running, 0.0)
    returns = torch.where(mask, advantages + wide, 0.0)
    return advantages.to(values.dtype), returns.to(values.dtype)


@torch.no_grad()
def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """Compute a lam for every row that grows with its length (VAPO; Yue et al. 2025).

        lam_i = max(0, 1 - 1 / (alpha length_i))

    The weights lam^l of GAE sum to 1 / (1 - lam) = alpha length_i, the same share of every row.

    Args:
        mask: (B,T); the length of a row is the number of its True slots.
        alpha: above 0; the paper has 0.05, which gives rows of up to 20 tokens lam 0.

    Returns:
        (B,) in float64, for `gae`; 0 for a row without a token.
    """
    return (1 - 1 / (alpha * mask.sum(1).double())).clamp(min=0)


@torch.no_grad()
def n_step(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    n: int | None,
    gamma: float = 1.0,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute n-step advantages and their targets (A2C; Mnih et al. 2016, section 4).

        R_t = r_t + ... + gamma^{n-1} r_{t+n-1} + gamma^n V_{t+n},   A_t = R_t - V_t

    n = 1 is online A2C. With n = None, or past the end of a row, the sum runs to the end, and V
    there is `bootstrap_value` (see `gae`). With gamma 1 the policy gradient is unbiased where the
    sum runs to the end or V_{t+n} is exact; otherwise it contains the critic's error at t+n.

    Returns:
        advantages (B,T) and targets R (B,T).

    Raises:
        ValueError: n is below 1.

    Elsewhere: a well-known tutorial puts V itself in place of the last return, so the last reward
    is lost and the last advantage is 0. It also treats a truncated episode as a finished one.
    """
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, or None for the whole row, got {n}")
    wide = values.double()
    # Push the holes to the right, so that "next True slot" is "next column".
    order = torch.argsort(mask.logical_not(), dim=1, stable=True)
    dense = mask.gather(1, order)
    value = _with_end(wide.gather(1, order), bootstrap_value)
    value = torch.where(pad(dense, (0, 1)), value, value[:, -1:])
    target = _scan(gamma, rewards.double().gather(1, order), dense, value, n)
    targets = torch.zeros_like(wide).scatter(1, order, torch.where(dense, target, 0.0))
    advantages = torch.where(mask, targets - wide, 0.0)
    return advantages.to(values.dtype), targets.to(values.dtype)


def _scan(
    decay: float | Tensor,
    paid: Tensor,
    mask: Tensor,
    start: Tensor | None = None,
    n: int | None = None,
) -> Tensor:
    """Run a recursion from the right in log2(n) steps (Hillis & Steele 1986).

        x_t = paid_t + decay x_{t+1}    in True slots, n times over; False slots hand on x_{t+1}

    Every slot is a map x -> offset + slope x, and so are the 2, 4, 8 ... slots from it on. Slopes
    are multiplied and never divided by, so a power of `decay` may vanish. All of it is in float64,
    since each squaring doubles the error of such a power.

    Args:
        decay: one for all rows, or (B,1).
        paid: (B,T) in float64; anything in a False slot.
        start: (B,T+1), initial x; its last column is after the last slot and never changes. None
            is 0.
        n: None for the whole row. Padding adds steps, but does not change the order of any sum.
    """
    width = mask.shape[1]
    n = width if n is None else min(n, width)
    x = paid.new_zeros(len(paid), width + 1) if start is None else start
    slope = pad(torch.ones_like(paid).where(~mask, decay), (0, 1), value=1.0)
    offset = pad(torch.where(mask, paid, 0.0), (0, 1))
    columns = torch.arange(width + 1, device=mask.device)
    for bit in range(n.bit_length()):
        later = (columns + 2**bit).clamp(max=width)
        if n >> bit & 1:
            x = torch.addcmul(offset, slope, x[:, later])
        offset = torch.addcmul(offset, slope, offset[:, later])
        slope = slope * slope[:, later]
    return x[:, :width]


def _next(x: Tensor, mask: Tensor) -> Tensor:
    """Return x, (B,T+1), at the next True slot, (B,T), or its last column where there is none."""
    width = mask.shape[1]
    columns = torch.arange(width, device=mask.device)
    slots = pad(torch.where(mask, columns, width), (0, 1), value=width)
    return x.gather(1, slots.flip(1).cummin(1).values.flip(1)[:, 1:])


def _with_end(values: Tensor, bootstrap_value: Tensor | None) -> Tensor:
    """Append the value of the state after the last True slot, giving (B,T+1)."""
    if bootstrap_value is None:
        return pad(values, (0, 1))
    return torch.cat([values, bootstrap_value.detach().to(values)[:, None]], dim=1)
