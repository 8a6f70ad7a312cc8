"""The per-token loss of the critic."""

import torch
from torch import Tensor

from rlhf_pg.losses.policy import Loss


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
