"""Drawing of tokens from a distribution, with noise that depends only on its coordinates."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_pg.masking import widen
from rlhf_pg.rng import mix, shift, signed
from rlhf_pg.rollout.engine import SamplingParams

BLOCK = 128  # tokens whose probabilities are summed before looking at single ones


class Drawn(NamedTuple):
    """Tokens drawn for R rows, and where the noise of each row fell.

    At temperature 0, `into` is how far the first logit is from the second, and the rest is 0.
    """

    ids: Tensor  # (R,)
    logprobs: Tensor  # (R,) under the distribution drawn from, in at least float32
    before: Tensor  # (R,) float64, probability of the tokens with smaller ids
    into: Tensor  # (R,) by how much the noise is beyond that
    width: Tensor  # (R,) probability of the token


def sample(logits: Tensor, params: SamplingParams, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: (R,V) in any floating dtype.
        noise: (R,) float64 in [0, 1), from `uniform`.

    Returns:
        ids (R,) and their log-probabilities (R,) under the distribution drawn from, after
        temperature and truncation, in at least float32.
    """
    return draw(logits, params, noise)[:2]


def draw(logits: Tensor, params: SamplingParams, noise: Tensor) -> Drawn:
    """Draw as `sample` does, and tell where the noise fell."""
    logits = widen(logits)
    if params.temperature == 0:
        ids = logits.argmax(dim=-1)
        best = logits.topk(min(2, logits.shape[1]), dim=-1).values.double()
        nothing = torch.zeros_like(noise)
        logprobs = _pick(logits, ids) - logits.logsumexp(dim=-1)
        return Drawn(ids, logprobs, nothing, best[:, 0] - best[:, -1], nothing)
    if params.temperature != 1:
        logits = logits / params.temperature
    scores = _truncate(logits, params)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    if weights.shape[1] % BLOCK:
        weights = nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK))
    weights = weights.view(len(scores), -1, BLOCK)
    # First find the block, then the token in it: the vocabulary is summed once, not scanned.
    blocks = _running_sums(weights.sum(dim=-1).double())
    block, rest = _invert(blocks, noise)
    inside = weights[torch.arange(len(block), device=block.device), block].double()
    token, place = _invert(_running_sums(inside), rest)
    ids = (block * BLOCK + token).clamp(max=scores.shape[1] - 1)  # only NaN logits get there
    logprobs = _pick(scores, ids) - top.squeeze(1) - blocks[:, -1].log().to(scores.dtype)
    width = _pick(inside, token) / blocks[:, -1]
    into = place * width
    return Drawn(ids, logprobs, noise - into, into, width)


def support_mask(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the tokens that `sample` draws from, (R,V) bool, given the same (R,V) logits.

    At temperature 0, where nothing is truncated, these are all tokens.
    """
    if not params.truncates:
        return torch.ones_like(logits, dtype=torch.bool)
    return _truncate(widen(logits) / params.temperature, params) > -torch.inf


def ids_of(kept: Tensor) -> list[Tensor]:
    """Return the ids of the True tokens of each row of (R,V), int32 on the CPU."""
    ids = kept.nonzero()[:, 1].int().cpu()
    return list(torch.split(ids, kept.sum(dim=1).tolist()))


def _invert(cdf: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find the step of each row's cumulative distribution where `noise` in [0, 1) falls.

    The distribution may sum to anything. Also return the place within that step, again in [0, 1).
    """
    aim = noise[:, None] * cdf[:, -1:]
    # noise < 1 and `right` skip every step of width 0, at either end.
    place = torch.searchsorted(cdf, aim, right=True).clamp(max=cdf.shape[1] - 1)
    end = cdf.gather(1, place)
    start = torch.where(place > 0, cdf.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place.squeeze(1), ((aim - start) / (end - start)).clamp(0, 1 - 2**-53).squeeze(1)


def _running_sums(x: Tensor) -> Tensor:
    """Return the running sums of each row.

    It is a product where a GPU must sum in a fixed order, which torch does not promise for
    `cumsum`.
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim=-1)
    return x @ torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(1, ids[:, None]).squeeze(1)


def _truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p, then min-p, by the rules of `transformers`."""
    for warper in warpers(params):
        scores = warper(None, scores)
    return scores


def warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Return what truncates scores, in its order."""
    found: list[LogitsProcessor] = []
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        found.append(MinPLogitsWarper(params.min_p))
    return found


def uniform(seed: int, prompt_indices: Tensor, samples: Tensor, position: int | Tensor) -> Tensor:
    """Return noise in [0, 1), float64, a pure function of (seed, prompt index, sample, position).

    This is a counter-based generator (SplitMix64; Steele et al. 2014, after Salmon et al. 2011), so
    the noise of a row does not depend on the other rows, their order or the number of processes.

    Args:
        prompt_indices, samples: (R,) int64; `position` too, or one for all.
    """
    return uniform_at(row_key(seed, prompt_indices, samples), position)


def row_key(seed: int, prompt_indices: Tensor, samples: Tensor) -> Tensor:
    """Return (R,) int64, all that the noise of each row depends on but the position."""
    state = mix(torch.full_like(prompt_indices, signed(seed)))
    state = mix(state + prompt_indices)
    return mix(state + samples)


def uniform_at(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return the noise of `uniform` for rows with these keys."""
    return shift(mix(keys + position), 12).to(torch.float64) * 2.0**-52


def request_seed(seed: int, prompt_index: int, sample: int, position: int) -> int:
    """Return a seed in [0, 2**63) for an engine with its own noise, from the same coordinates."""
    key = row_key(seed, torch.tensor([prompt_index]), torch.tensor([sample]))
    return int(shift(mix(key + position), 1))
