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
        logprobs = _pick(logits, ids) - logits.logsumexp(dim=-1)
        return ids, logprobs
    if params.temperature != 1:
        logits = logits / params.temperature
    scores = truncate(logits, params)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    rows, width = weights.shape
    missing = -width % BLOCK
    if missing:
        weights = nn.functional.pad(weights, (0, missing))
    weights = weights.view(rows, -1, BLOCK)
    # Find the block, then the token in it, which is faster than a cumsum over the vocabulary.
    of_blocks = weights.sum(dim=-1)
    blocks = _running_sums(of_blocks.double())
    block, noise = _invert(blocks, noise)
    row = torch.arange(rows, device=block.device)
    of_tokens = weights[row, block]
    tokens = _running_sums(of_tokens.double())
    token, _ = _invert(tokens, noise)
    ids = block * BLOCK + token
    ids = ids.clamp(max=width - 1)  # exceeded only for NaN logits
    logprobs = _pick(scores, ids) - top.squeeze(1)
    total = blocks[:, -1].log()
    return ids, logprobs - total.to(scores.dtype)


def _invert(cdf: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find the step of each row's cumulative distribution where `noise` in [0, 1) falls.

    The distribution need not sum to 1. Also return how far it is within that step, again in [0, 1).
    """
    aim = noise[:, None] * cdf[:, -1:]
    # Steps of width 0 are never chosen: `right` skips those before, noise < 1 those at the end.
    step = torch.searchsorted(cdf, aim, right=True)
    step = step.clamp(max=cdf.shape[1] - 1)
    end = cdf.gather(1, step)
    before = (step - 1).clamp(min=0)
    start = cdf.gather(1, before)
    start = torch.where(step > 0, start, 0.0)
    fraction = (aim - start) / (end - start)
    fraction = fraction.clamp(0, 1 - 2**-53)
    return step.squeeze(1), fraction.squeeze(1)


def _running_sums(x: Tensor) -> Tensor:
    """Return the running sums of each row.

    On a GPU that must be deterministic this is a matrix product, since `cumsum` is not.
    """
    is_strict = x.is_cuda and torch.are_deterministic_algorithms_enabled()
    if not is_strict:
        return x.cumsum(dim=-1)
    size = x.shape[1]
    ones = x.new_ones(size, size)
    return x @ ones.triu()


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    picked = x.gather(1, ids[:, None])
    return picked.squeeze(1)


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
    seeds = torch.full_like(prompt_indices, as_signed(seed))
    state = mix(seeds)
    state = mix(state + prompt_indices)
    return mix(state + samples)


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return noise in [0, 1), float64, a pure function of (seed, prompt index, sample, position).

    This is a counter-based generator (SplitMix64; Steele et al. 2014, after Salmon et al. 2011): a
    row's noise does not depend on the other rows, their order or the number of processes.
    """
    drawn = mix(keys + position)
    bits = shift(drawn, 12)
    return bits.to(torch.float64) * 2.0**-52


def request_seed(
    seed: int,
    prompt_index: int,
    sample: int,
    position: int,
) -> int:
    """Return a seed in [0, 2**63) for an engine with its own noise, from the same coordinates."""
    key = row_key(
        seed,
        torch.tensor([prompt_index]),
        torch.tensor([sample]),
    )
    bits = shift(mix(key + position), 1)
    return int(bits)


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

    def ends(self, tokens: Sequence[int], further: Sequence[str] = ()) -> bool:
        """Return whether a completion ends with its last token, if it has not ended before;
        `further` are stop strings of its request.
        """
        if tokens[-1] in self.eos_token_ids:
            return True
        strings = [*self.strings, *further]
        if self.tokenizer is None or not strings:
            return False
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in strings)
