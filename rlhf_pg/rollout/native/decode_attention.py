"""Attention over keys and values in two parts: a prompt's, stored once, and each row's own.

Shapes: N tokens of the pass, H query and K key-value heads, D their width; G prompts, R rows (one
per completion being sampled), at most M rows per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_pg.models.attention import fused_on_cpu


class KeyValues:
    """Keys and values of every layer in slots, (slots, K, width, D) each, with growing capacity.

    Args:
        spare: the most tokens of spare capacity.
        longest: the most tokens that a slot may hold.
    """

    def __init__(self, spare: int, longest: int) -> None:
        self.spare, self.longest = spare, longest
        self.slots = self.width = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, width: int) -> None:
        """Make room for this many slots of this many tokens, and keep their contents.

        Capacity doubles while it is small, so that gradual growth copies each number only a few
        times. When it grows in one dimension, spare capacity in the other is given back.
        """
        if slots <= self.slots and width <= self.width:
            return
        wide = -(-width // 64) * 64
        if slots > self.slots and 2 * self.slots * wide <= self.spare:
            slots = max(2 * self.slots, slots)
        if width > self.width and slots * 2 * self.width <= self.spare:
            wide = max(min(2 * self.width, self.longest), wide)
        self.slots, self.width = slots, wide
        for layer, (keys, values) in self._layers.items():  # one by one, to save memory
            self._layers[layer] = (self._resize(keys), self._resize(values))

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stores of a layer; new ones are made to fit key and value (K,N,D)."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        return self._layers[layer]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole slots over others."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets] = tensor[sources]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros(self.slots, like.shape[0], self.width, like.shape[2])

    def _resize(self, old: Tensor) -> Tensor:
        new = self._empty(old[0])
        slots, width = min(len(old), self.slots), min(old.shape[2], self.width)
        new[:slots, :, :width] = old[:slots, :, :width]
        return new


class Prefill:
    """Prompts one after another in a packed row, each attending to itself.

    Args:
        store: receives their keys and values.
        slots: the prompts' slots in the store.
        lengths: the prompts' lengths; neighbours of equal length are computed together.
    """

    def __init__(self, store: KeyValues, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.store = store
        self.runs: list[tuple[list[int], int, int]] = []  # slots, first token, length of each
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            if self.runs and self.runs[-1][2] == length:
                self.runs[-1][0].append(slot)
            else:
                self.runs.append(([slot], start, length))
            start += length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.store.of(layer, key, value)
        parts = []
        for slots, start, length in self.runs:
            q, k, v = (
                x[:, start : start + len(slots) * length]
                .reshape(x.shape[0], len(slots), length, -1)
                .transpose(0, 1)
                for x in (query, key, value)
            )
            index = torch.tensor(slots, device=q.device)
            keys[index, :, :length] = k
            values[index, :, :length] = v
            copies = q.shape[1] // k.shape[1]  # query heads that share a key head
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Row r is in slot r of `own`, prompt g in slot g of `prompts`.
    """

    prompts: KeyValues
    own: KeyValues
    columns: Tensor | int  # (R,) the column of each row's newest token, or one for all
    members: Tensor  # (G,M) the rows of each prompt, padded with any row
    places: Tensor  # (R,) the index of each row in flattened `members`
    prompt_bias: Tensor  # (G,P) `bias` for the prompts' first P columns
    own_bias: Tensor  # (R,T) `bias` for the rows' first T columns, tokens written so far

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, heads = query.shape[1], key.shape[0]
        own_keys, own_values = self.own.of(layer, key, value)
        one = isinstance(self.columns, int)  # a slice is written faster
        index = slice(rows) if one else torch.arange(rows, device=query.device)
        own_keys[index, :, self.columns] = key.transpose(0, 1)
        own_values[index, :, self.columns] = value.transpose(0, 1)
        keys, values = self.prompts.of(layer, key, value)
        # Query heads that share a key head become additional queries of it: (R,K,H/K,D).
        q = query.view(heads, -1, rows, query.shape[2]).permute(2, 0, 1, 3)
        own = _attend(q, own_keys, own_values, self.own_bias, scale)
        of_prompt = q[self.members].transpose(1, 2)  # (G,K,M,H/K,D)
        most, shared = of_prompt.shape[2:4]
        prompt = _attend(of_prompt.flatten(2, 3), keys, values, self.prompt_bias, scale)
        back = PartialSoftmax(
            *(
                x.view(-1, heads, most, shared, x.shape[3])
                .transpose(1, 2)
                .flatten(0, 1)[self.places]
                for x in prompt
            )
        )
        return together(back, own).flatten(1, 2).to(query.dtype)


class PartialSoftmax(NamedTuple):
    """Attention over one part of the keys, for `together`; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an additive bias: 0 where it is True, minus infinity elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> PartialSoftmax:
    """Attend with query (B,K,Q,D) to B slots; scores are scaled, and (B,W) is added to them."""
    slots, width = bias.shape
    keys, values = keys[:slots, :, :width], values[:slots, :, :width]
    if keys.device.type == "cpu" and keys.dtype == bias.dtype and keys.shape == values.shape:
        out, logsum = fused_on_cpu(query, keys, values, attn_mask=bias[:, None, None], scale=scale)
        return PartialSoftmax(out, logsum[..., None])
    scores = torch.add(bias[:, None, None], _product(query, keys.transpose(2, 3)), alpha=scale)
    logsum = scores.logsumexp(dim=-1, keepdim=True)
    return PartialSoftmax(_product(scores.sub_(logsum).exp_(), values), logsum)


def together(a: PartialSoftmax, b: PartialSoftmax) -> Tensor:
    """Combine both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    return torch.lerp(a.values, b.values, torch.sigmoid(b.logsum - a.logsum))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed in at least float32; `b` is the stored tensor."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
