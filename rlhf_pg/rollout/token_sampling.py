"""Draw tokens with noise that depends only on its coordinates, and end completions early at EOS or
stop strings.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_pg.masking import widen
from rlhf_pg.rng import as_signed, mix, shift
from rlhf_pg.rollout.engine import SamplingParams

BLOCK = 128  # tokens in a block, whose probabilities are summed first


def sample(logits: Tensor, params: SamplingParams, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: (R,V) in any floating dtype.
        noise: (R,) float64 in [0, 1), from `uniform`.

    Returns:
        ids (R,) and their log-probabilities (R,) under the distribution drawn from, after
        temperature and truncation, in at least float32.
    """
    logits = widen(logits)
    if params.temperature == 0:
        ids = logits.argmax(dim=-1)
        return ids, _pick(logits, ids) - logits.logsumexp(dim=-1)
    if params.temperature != 1:
        logits = logits / params.temperature
    scores = truncate(logits, params)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    if weights.shape[1] % BLOCK:
        weights = nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK))
    weights = weights.view(len(scores), -1, BLOCK)
    # Find the block, then the token in it, which is faster than a cumsum over the vocabulary.
    blocks = _running_sums(weights.sum(dim=-1).double())
    block, rest = _invert(blocks, noise)
    inside = _running_sums(weights[torch.arange(len(block), device=block.device), block].double())
    token, _ = _invert(inside, rest)
    ids = (block * BLOCK + token).clamp(max=scores.shape[1] - 1)  # exceeded only for NaN logits
    return ids, _pick(scores, ids) - top.squeeze(1) - blocks[:, -1].log().to(scores.dtype)


def _invert(cdf: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find the step of each row's cumulative distribution where `noise` in [0, 1) falls.

    The distribution need not sum to 1. Also return the place within that step, again in [0, 1).
    """
    aim = noise[:, None] * cdf[:, -1:]
    # Steps of width 0 are never chosen: `right` skips those before, noise < 1 those at the end.
    place = torch.searchsorted(cdf, aim, right=True).clamp(max=cdf.shape[1] - 1)
    end = cdf.gather(1, place)
    start = torch.where(place > 0, cdf.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place.squeeze(1), ((aim - start) / (end - start)).clamp(0, 1 - 2**-53).squeeze(1)


def _running_sums(x: Tensor) -> Tensor:
    """Return the running sums of each row.

    On a GPU that must be deterministic this is a matrix product, since `cumsum` is not.
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim=-1)
    return x @ torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(1, ids[:, None]).squeeze(1)


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, then top-p, then min-p, by the rules of `transformers`."""
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    truncated: Tensor = warpers(None, scores)
    return truncated


def row_key(seed: int, prompt_indices: Tensor, samples: Tensor) -> Tensor:
    """Return (R,) int64: each row's seed, to which the noise adds the position."""
    state = mix(torch.full_like(prompt_indices, as_signed(seed)))
    state = mix(state + prompt_indices)
    return mix(state + samples)


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return noise in [0, 1), float64, a pure function of (seed, prompt index, sample, position).

    This is a counter-based generator (SplitMix64; Steele et al. 2014, after Salmon et al. 2011): a
    row's noise does not depend on the other rows, their order or the number of processes.
    """
    return shift(mix(keys + position), 12).to(torch.float64) * 2.0**-52


def request_seed(seed: int, prompt_index: int, sample: int, position: int) -> int:
    """Return a seed in [0, 2**63) for an engine with its own noise, from the same coordinates."""
    key = row_key(seed, torch.tensor([prompt_index]), torch.tensor([sample]))
    return int(shift(mix(key + position), 1))


@dataclass(frozen=True)
class Stopping:
    """The EOS ids, and the stop strings to look for in the decoded text.

    ValueError if there are strings but no tokenizer.
    """

    eos_token_ids: Collection[int]
    strings: Sequence[str] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give NativeEngine one")

    def ends(self, tokens: Sequence[int], more: Sequence[str] = ()) -> bool:
        """Return whether a completion ends with its last token, if it has not ended before; `more`
        are further strings.
        """
        if tokens[-1] in self.eos_token_ids:
            return True
        strings = (*self.strings, *more)
        if self.tokenizer is None or not strings:
            return False
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in strings)
