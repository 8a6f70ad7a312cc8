"""Per token: what a row's own rewards and values say of each of its tokens. (B,T) throughout."""

import torch
from torch import Tensor

from rlhf_pg.masking import widen


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Reward-to-go (Williams 1992; Sutton & Barto, 3.9).

        G_t = r_t + gamma G_{t+1}

    With gamma 1 the policy gradient is unbiased, whatever constant or value of the state before t
    is subtracted; a smaller gamma follows the gradient of a shorter-sighted objective.

    Args:
        rewards, mask: (B,T); what stands in a False slot is not paid.

    Returns:
        (B,T).

    Elsewhere: verl's REINFORCE++ starts again at every hole of the mask, so what comes after a
    tool's output is no credit to the tokens before it.
    """
    wide = widen(rewards)
    running = wide.new_zeros(wide.shape[0])
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], wide[:, t] + gamma * running, running)
        returns[:, t] = torch.where(mask[:, t], running, 0.0)
    return returns


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16; PPO Eq. 11 where truncated).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

    With gamma 1 the policy gradient is unbiased at lam 1, and at any lam where V is exact;
    otherwise 1 - lam of what the critic gets wrong about the next state goes into it.

    Args:
        rewards, values: (B,T); `values[:, t]` is V of the state *before* token t.
        mask: (B,T).
        lam: one for all rows, or (B,).
        bootstrap_value: (B,) V of the state after the last True slot of a truncated row; 0, or None
            for all rows, where the episode really ended.

    Returns:
        advantages (B,T), not whitened, and returns (B,T) = advantages + values.

    Elsewhere: skrl's documentation has a minus before gamma lam A_{t+1} (its code has the plus),
    and skrl adds gamma V_t, not V_{t+1}, where an episode was cut off. TRL's PPO paid the score one
    slot after EOS.
    """
    wide = widen(values)
    lam = lam.to(wide) if isinstance(lam, Tensor) else lam
    next_value = _bootstrap(wide, bootstrap_value)
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(wide)
    for t in reversed(range(wide.shape[1])):
        real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - wide[:, t]
        running = torch.where(real, delta + gamma * lam * running, running)
        next_value = torch.where(real, wide[:, t], next_value)
        advantages[:, t] = torch.where(real, running, 0.0)
    returns = torch.where(mask, advantages + wide, 0.0)
    return advantages.to(values.dtype), returns.to(values.dtype)


@torch.no_grad()
def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """A lam for every row that grows with its length (VAPO; Yue et al. 2025, length-adaptive GAE).

        lam_i = max(0, 1 - 1 / (alpha length_i))

    The weights lam^l of GAE sum to 1 / (1 - lam) = alpha length_i: the same share of every row.

    Args:
        mask: (B,T); a row's length is its True slots.
        alpha: above 0; the paper has 0.05, with which rows of up to 20 tokens get lam 0.

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
    """n-step advantages and their targets (A2C; Mnih et al. 2016, section 4).

        R_t = r_t + ... + gamma^{n-1} r_{t+n-1} + gamma^n V_{t+n},   A_t = R_t - V_t

    n = 1 is online A2C. With n = None, or past the end of a row, the sum runs to the end and V
    there is `bootstrap_value` (see `gae`). With gamma 1 the policy gradient is unbiased where the
    sum runs to the end or V_{t+n} is exact; otherwise it has the critic's error at t+n in it.

    Returns:
        advantages (B,T) and targets R (B,T).

    Raises:
        ValueError: n below 1.

    Elsewhere: a well-known tutorial puts V itself in the place of the last return, so the last
    reward is lost and the last advantage is 0; and it takes a cut-off episode for a finished one.
    """
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, or None for the whole row, got {n}")
    width = values.shape[1]
    wide = widen(values)
    # Push the holes to the right, so that "next True slot" is "next column".
    order = torch.argsort(mask.logical_not(), dim=1, stable=True)
    dense = mask.gather(1, order)
    end = _bootstrap(wide, bootstrap_value)[:, None].expand_as(wide)
    reward = torch.where(dense, rewards.gather(1, order), 0.0)
    value = torch.where(dense, wide.gather(1, order), end)
    target = value
    for _ in range(width if n is None else min(n, width)):
        # R^(k)_t = r_t + gamma R^(k-1)_{t+1}, starting from R^(0)_t = V_t.
        following = torch.cat([target[:, 1:], end[:, :1]], dim=1)
        target = torch.where(dense, reward + gamma * following, end)
    targets = torch.zeros_like(wide).scatter(1, order, torch.where(dense, target, 0.0))
    advantages = torch.where(mask, targets - wide, 0.0)
    return advantages.to(values.dtype), targets.to(values.dtype)


def _bootstrap(values: Tensor, bootstrap_value: Tensor | None) -> Tensor:
    if bootstrap_value is None:
        return values.new_zeros(values.shape[0])
    return bootstrap_value.detach().to(values)
