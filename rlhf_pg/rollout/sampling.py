"""Drawing a token: the distribution, and noise that depends on nothing but its own coordinates."""

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_pg.masking import widen
from rlhf_pg.rollout.engine import SamplingParams


def sample(logits: Tensor, params: SamplingParams, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: (R,V) in any floating dtype.
        noise: (R,) float64 in [0, 1), see `uniform`.

    Returns:
        ids (R,) and their log-probabilities (R,) under the distribution drawn from, after
        temperature and truncation, in at least float32.
    """
    logits = widen(logits)
    if params.temperature == 0:
        ids = logits.argmax(dim=-1)
        return ids, _pick(logits.log_softmax(dim=-1), ids)
    logprobs = _truncate(logits / params.temperature, params).log_softmax(dim=-1)
    cdf = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # noise < 1 and `right` skip every token of probability 0, at either end of the vocabulary.
    ids = torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:], right=True).squeeze(1)
    ids = ids.clamp(max=logits.shape[1] - 1)  # only NaN logits get there
    return ids, _pick(logprobs, ids)


def _pick(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(1, ids[:, None]).squeeze(1)


def _truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """top-k, then top-p, then min-p, by the rules of `transformers`."""
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    truncated: Tensor = warpers(None, scores)
    return truncated


def uniform(seed: int, draws: Tensor, samples: Tensor, position: int) -> Tensor:
    """Noise in [0, 1), float64: a pure function of (seed, draw, sample, position).

    A counter-based generator (SplitMix64; Steele et al. 2014, after Salmon et al. 2011), so what a
    row is given does not depend on the other rows, their order or the number of processes.

    Args:
        draws, samples: (R,) int64.
    """
    state = _mix(torch.full_like(draws, _signed(seed)))
    state = _mix(state + draws)
    state = _mix(state + samples)
    state = _mix(state + position)
    return _shift(state, 12).to(torch.float64) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """One step of SplitMix64; int64 arithmetic wraps around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63
