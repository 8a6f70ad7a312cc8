"""Masks over tokens, and statistics over the tokens that a mask selects.

Shapes: B rows, T columns. A mask is bool; values under False may be anything, NaN included.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Cast to at least float32, so that sums over many low-precision numbers keep their digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def completion_mask(ids: Tensor, eos_token_ids: int | Iterable[int]) -> Tensor:
    """Return True through the first EOS of every row, inclusive; the whole row if there is none.

    It is meant for raw padded ids, where pad may equal EOS: only the first EOS belongs to the
    completion.

    Args:
        ids: (B,T) token ids of the completions alone, without the prompts.
        eos_token_ids: one id or several; each of them ends a row.

    Returns:
        (B,T) bool.

    Elsewhere: with EOS as the pad token, a mask of `ids != pad` hides the EOS of every completion,
    and the policy never learns to stop (TRL #4970).
    """
    stops = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    is_eos = torch.isin(ids, torch.tensor(stops, dtype=ids.dtype, device=ids.device))
    eos_before = is_eos.cumsum(dim=-1) - is_eos.long()
    return eos_before == 0


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Compute the mean of `x` where `mask` is True; 0 where no slot is True.

        sum of x_i over True slots / number of True slots

    It is differentiable; a masked slot gets gradient 0, even if it is NaN.

    Args:
        x: any shape; `mask` broadcasts to it.
        dim: the dimension to reduce, or None for all of them.

    Returns:
        A scalar, or `x` without `dim`.

    Elsewhere: with `(x * mask).sum()`, a NaN in a masked slot makes the result NaN.
    """
    mask = mask.expand_as(x)
    wide = torch.where(mask, widen(x), 0.0)
    total, count = (wide.sum(), mask.sum()) if dim is None else (wide.sum(dim), mask.sum(dim))
    return (total / count.clamp(min=1)).to(float_dtype(x))


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = False) -> Tensor:
    """Compute the variance over all True slots, with Bessel's correction if `unbiased`.

        sum of (x_i - mean)^2 over the n True slots / n, or / (n - 1)

    Args:
        x: any shape; `mask` broadcasts to it.

    Returns:
        A scalar; 0 if at most one slot is True.
    """
    mask = mask.expand_as(x)
    wide = torch.where(mask, widen(x), 0.0)
    count = mask.sum()
    mean = wide.sum() / count.clamp(min=1)
    squares = torch.where(mask, (wide - mean) ** 2, 0.0).sum()
    return (squares / (count - int(unbiased)).clamp(min=1)).to(float_dtype(x))


def whiten(
    x: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    stats: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) over the True slots, with the population variance.

    Args:
        x: any shape; `mask` broadcasts to it.
        shift_mean: False adds the mean back, so only the scale changes.
        stats: (mean, var) reduced over all processes; by default those of `x` under `mask`.

    Returns:
        Like `x`; 0 in masked slots. Where nothing varies (one token, or all equal) the whitened
        value is exactly 0 before the mean is added back: rounding noise is never scaled up.

    Elsewhere: TRL's PPO whitened each process by its own statistics, so the number of processes
    changed the result. The RLHF book whitens the padding with the tokens. torchtune's `shift_mean`
    means the opposite of TRL's; this function follows TRL.
    """
    mask = mask.expand_as(x)
    wide = torch.where(mask, widen(x), 0.0)
    if stats is None:
        mean = masked_mean(wide, mask)
        var = masked_var(wide, mask)
        exact = masked_var(wide.double(), mask)
        varies = (wide[mask] != wide[mask][:1]).any()
    else:
        mean, var = (torch.as_tensor(s, device=x.device).to(wide.dtype) for s in stats)
        exact = torch.as_tensor(stats[1], device=x.device).double()
        # Equal numbers leave a variance of rounding errors, a few (eps * mean)^2.
        varies = exact > (4 * torch.finfo(wide.dtype).eps * mean.double()) ** 2
    # A variance may overflow the dtype where its root does not: all would become 0.
    scale = torch.where(var.isinf(), exact.rsqrt().to(wide.dtype), torch.rsqrt(var + 1e-8))
    whitened = torch.where(varies, (wide - mean) * scale, 0.0)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(float_dtype(x))


def float_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a result: that of `x`, or float32 for whole numbers."""
    if x.is_floating_point():
        return x.dtype
    return torch.float32
