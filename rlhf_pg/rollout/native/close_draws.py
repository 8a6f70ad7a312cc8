"""Draws that rounding may have decided.

Shapes: R rows, V ids, C the width of hidden states.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_pg.masking import widen
from rlhf_pg.rollout.engine import SamplingParams
from rlhf_pg.rollout.token_sampling import Drawn, warpers

# By how many times the rounding error of the largest logit those computed beside others were seen
# to differ from those computed alone: 1 in the mean, up to 10 for random models of 3 vocabularies,
# up to 47 for a trained one at a temperature of 2. `Head` estimates were off by up to 25.
ROUNDING = 64


class Head(NamedTuple):
    """The output layer, which turns an error of hidden states into errors of all logits."""

    weight: Tensor  # (V,C)
    norm: Tensor  # root mean square, over ids, of the distance from the mean row

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Return that of a model, or None if it is no matrix."""
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if weight is None or weight.ndim != 2:
            return None
        weight = weight.detach()
        return cls(weight, (weight.float().var(dim=0, correction=0).sum()).sqrt())


def close_draws(
    logits: Tensor, params: SamplingParams, drawn: Drawn, head: Head | None = None
) -> Tensor:
    """Return the rows, (R,) bool, in which rounding may have decided between two tokens.

    The logits of a row differ in their last bits with the tokens that are computed beside it. If
    each is off by at most e, the probability F of the tokens up to some id is off by

        |dF| = |sum_v q_v e_v| <= 2 e F (1 - F),   q_v = p_v (1[v <= id] - F)

    and, where tokens are left out, by the probability of those that a cut might have treated in
    another way. The noise of a close draw is that near to another token. Errors of V logits come
    from C hidden numbers and from V sums, so they seldom agree in sign with q, and one estimates

        |dF| <= e (|q W| / |W| + |q|)

    which is much less where many tokens are likely.

    Args:
        logits: (R,V) that `drawn` was drawn from.
        head: the W above; without it only the first bound is used.
    """
    scores = widen(logits)
    low, high = scores.aminmax(dim=-1)
    error = ROUNDING * torch.finfo(scores.dtype).eps * torch.maximum(-low, high).double()
    if params.temperature == 0:
        return drawn.into < 2 * error
    if params.temperature != 1:
        scores, error = scores / params.temperature, error / params.temperature
    shifted = torch.zeros_like(error)
    for warper in warpers(params):
        before, scores = scores, warper(None, scores)
        shifted = shifted + _mass_at_cut(before, scores, warper, error + shifted)
    # F (1 - F) is at most 1/4, which settles nearly all draws.
    close = torch.minimum(drawn.into, drawn.width - drawn.into) < 0.5 * error + shifted
    unsettled = close.nonzero().flatten()
    for begin in range(0, len(unsettled), 16):  # to save memory
        rows = unsettled[begin : begin + 16]
        one = scores[rows].softmax(dim=-1)
        first = _moved(one, drawn.ids[rows] - 1, head) * error[rows] + shifted[rows]
        last = _moved(one, drawn.ids[rows], head) * error[rows] + shifted[rows]
        is_first = drawn.into[rows] < first
        close[rows] = is_first | (drawn.width[rows] - drawn.into[rows] < last)
    return close


def _moved(p: Tensor, last: Tensor, head: Head | None) -> Tensor:
    """Return |dF| / e, (R,), for the F of the ids up to `last` (R,) under p (R,V)."""
    below = torch.arange(p.shape[1]) <= last[:, None]
    share = (p * below).sum(dim=-1, keepdim=True)
    most = (2 * share * (1 - share)).squeeze(1).double()
    if head is None:
        return most
    q = p * (below.to(p.dtype) - share)
    together: Tensor = (q.to(head.weight.dtype) @ head.weight).norm(dim=1) / head.norm
    return torch.minimum(most, together.double() + q.norm(dim=1))


def _mass_at_cut(before: Tensor, after: Tensor, warper: LogitsProcessor, error: Tensor) -> Tensor:
    """Return the probability, (R,), of the tokens that a cut treats so by less than the error.

    Args:
        before, after: (R,V) scores, of which `after` are cut.
        error: (R,) of a score, and of a sum of probabilities.
    """
    kept = after > -torch.inf
    left_out = before.masked_fill(kept, -torch.inf)
    last, first = before.masked_fill(~kept, torch.inf).amin(dim=-1), left_out.amax(dim=-1)
    p = before.softmax(dim=-1)
    mass = (p * kept).sum(dim=-1)
    close = last - first < 2 * error
    if isinstance(warper, TopKLogitsWarper):
        close |= kept.sum(dim=-1) > warper.top_k  # equal scores, all kept
    elif isinstance(warper, MinPLogitsWarper):
        bar = before.amax(dim=-1) + math.log(warper.min_p)
        close |= torch.minimum(last - bar, bar - first) < 2 * error
    elif isinstance(warper, TopPLogitsWarper):
        over = mass - warper.top_p  # at least 0, and without the last token below 0
        smallest = (last - before.logsumexp(dim=-1)).exp()
        close |= torch.minimum(over, smallest - over) < 2 * error
    bounds = torch.stack([last, first], dim=1)[:, :, None]
    near = ((before[:, None] - bounds).abs() < 2 * error[:, None, None]).any(dim=1)
    return torch.where(close, (p * near).sum(dim=-1) / mass + 4 * error, 0.0)
