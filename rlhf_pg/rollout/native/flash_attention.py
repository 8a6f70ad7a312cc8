"""Attention in two parts by torch's variable-length FlashAttention, on a GPU in 16 bits.

The kernel reads no padding, takes fewer key heads than query heads, and returns the log of the sum
of exp(score), by which the parts are joined (FlashAttention-2; Dao 2023). So decoding does not need
the packages flash-attn, kernels or FlashInfer.

Shapes: N tokens of the pass, H query and K key-value heads, D their width, S = H/K; R rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pg.models.attention import Heads

QUERIES = 64  # per key head, of rows that share a prompt: the kernel's blocks have 64 or 128


class Weighed(NamedTuple):
    """One part of a softmax, to be joined with the other; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


def together(a: Weighed, b: Weighed) -> Tensor:
    """Join both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    return torch.lerp(a.values, b.values, torch.sigmoid(b.logsum - a.logsum))


class FlatKeyValues:
    """Keys and values of every layer, token by token, (tokens, K, D) each."""

    def __init__(self, layers: Mapping[int, Heads], device: torch.device) -> None:
        self.shapes, self.device = layers, device
        self.tokens = 0  # the most room so far: growing again would change addresses
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, tokens: int) -> None:
        """Make room for this many tokens, and keep what is there."""
        if self.layers and tokens <= self.tokens:
            return
        self.tokens = max(tokens, self.tokens)
        if not self.layers:
            self._allocate()
            return
        for layer, pair in self.layers.items():  # one by one, to save memory
            new = (self._empty(self.shapes[layer]), self._empty(self.shapes[layer]))
            for more, tensor in zip(new, pair, strict=True):
                more[: len(tensor)] = tensor
            self.layers[layer] = new

    def _allocate(self) -> None:
        """Allocate all layers, giving each the same block again, whatever the allocator's order."""
        for heads in set(self.shapes.values()):
            layers = sorted(layer for layer, other in self.shapes.items() if other == heads)
            blocks = sorted((self._empty(heads) for _ in 2 * layers), key=Tensor.data_ptr)
            pairs = zip(blocks[::2], blocks[1::2], strict=True)
            self.layers |= zip(layers, pairs, strict=True)

    def _empty(self, heads: Heads) -> Tensor:
        shape = (self.tokens, heads.key_values, heads.width)
        empty = torch.empty(shape, dtype=heads.dtype, device=self.device)
        torch._dynamo.mark_static(empty, [1, 2])  # else equal numbers of rows and heads are tied
        return empty

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values (K,N,D) into a layer at the places (N,); return the whole layer."""
        keys, values = self.layers[layer]
        keys[index], values[index] = key.transpose(0, 1), value.transpose(0, 1)
        return keys, values

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all layers."""
        return [tensor for pair in self.layers.values() for tensor in pair]


@dataclass(frozen=True, kw_only=True)
class FlashPrefill:
    """Prompts one after another in a packed row, each attending to itself."""

    store: FlatKeyValues
    index: Tensor  # (N,) places of their tokens in the store
    bounds: Tensor  # (P+1,) int32; prompt p has the tokens from bounds[p] to bounds[p + 1]
    longest: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.store.write(layer, self.index, key, value)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = _flash(q, k, v, self.bounds, self.bounds, None, self.longest, scale, causal=True)
        return out[0]


@dataclass(frozen=True, kw_only=True)
class FlashDecode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Rows are in the order of `Places`.
    """

    prompts: FlatKeyValues
    own: FlatKeyValues
    index: Tensor  # (R,) places of the newest tokens
    own_starts: Tensor  # (R+1,) int32
    own_lengths: Tensor  # (R,) int32
    starts: Tensor  # see `Places`
    lengths: Tensor
    bounds: dict[int, tuple[Tensor, Tensor]]  # by S: queries of each row, and of each run

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, rows, width = key.shape
        own = self.own.write(layer, self.index, key, value)
        # Query heads that share a key head become additional queries of it: (RS,K,D).
        q = query.view(heads, -1, rows, width).permute(2, 1, 0, 3)
        shared = q.shape[1]
        q = q.reshape(-1, heads, width)
        each, runs = self.bounds[shared]
        of_own = _weigh(q, own, each, self.own_starts, self.own_lengths, shared, scale)
        prompts, most = self.prompts.layers[layer], max(QUERIES, shared)
        of_prompt = _weigh(q, prompts, runs, self.starts, self.lengths, most, scale)
        out = together(of_prompt, of_own).to(query.dtype)
        return out.view(rows, shared, heads, width).transpose(1, 2).flatten(1, 2)


def _weigh(
    query: Tensor,
    store: tuple[Tensor, Tensor],
    runs: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    scale: float,
) -> Weighed:
    out, logsum = _flash(query, *store, runs, starts, lengths, most, scale)
    return Weighed(out.float(), logsum.t()[..., None])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Tensor,
    starts: Tensor,
    lengths: Tensor | None,
    most: int,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs (N,H,D), and the log of the sum of exp(score) (H,N).

    Args:
        query: (N,H,D); run i has those from runs[i] to runs[i + 1], at most `most`.
        key, value: (.,K,D); those of run i begin at starts[i] and are lengths[i], or, without
            lengths, go on to starts[i + 1].
    """
    out, logsum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, runs, starts, most, key.shape[0], 0.0, causal, False,
        scale=scale, seqused_k=lengths,
    )  # fmt: skip
    return out, logsum
