"""Attention over keys and values in two parts: those of a prompt, stored once, and of each row.

Shapes: N tokens of the pass, H query and K key-value heads, D their width; G prompts, R rows (one
per completion being sampled) with up to W tokens each, M rows of the prompt with the most, Q
queries of a row and key head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NARROWEST = 64  # columns of the first span


class KeyValues:
    """Keys and values of every layer in slots, (slots, K, width, D) each, with room that grows.

    Args:
        spare: the most tokens of room beyond what is needed.
        longest: the most tokens that a slot may hold.
    """

    def __init__(self, spare: int, longest: int) -> None:
        self.spare, self.longest = spare, longest
        self.slots = self.width = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, width: int) -> None:
        """Make room for this many slots of this many tokens, and keep what they hold.

        Room is doubled while it is small, so that growing bit by bit copies each number only a few
        times. When it grows in one dimension, spare room in the other is given back.
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
            self._layers[layer] = (self._resized(keys), self._resized(values))

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stores of a layer, made to fit key and value (K,N,D) if they are new."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        return self._layers[layer]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole slots over others."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets] = tensor[sources]

    def lies(self) -> tuple[int, ...]:
        """Return the addresses and sizes, which change whenever room has grown."""
        places = (tensor.data_ptr() for pair in self._layers.values() for tensor in pair)
        return (self.slots, self.width, *places)

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros(self.slots, like.shape[0], self.width, like.shape[2])

    def _resized(self, old: Tensor) -> Tensor:
        new = self._empty(old[0])
        slots, width = min(len(old), self.slots), min(old.shape[2], self.width)
        new[:slots, :, :width] = old[:slots, :, :width]
        return new


class Spans:
    """Keys and values of rows in several stores: columns 0 to 63, to 127, to 255 and so on.

    Rows are about equally long. In one wide store, what is read of a row would be followed by room
    that is still empty; here it is followed by the next row, and a CPU reads twice as fast.

    Args:
        spare, longest: as for `KeyValues`.
        split: False for a single store, which never moves within a CUDA graph.
    """

    def __init__(self, spare: int, longest: int, split: bool) -> None:
        self.spare, self.longest, self.split = spare, longest, split
        self.stores = [KeyValues(spare, NARROWEST if split else longest)]

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(store.width for store in self.stores)

    def reserve(self, slots: int, width: int) -> None:
        """Make room for this many slots of this many tokens, and keep what they hold."""
        while self.split and width > (room := sum(store.longest for store in self.stores)):
            self.stores.append(KeyValues(self.spare, room))
        last = self.stores[-1]
        for store in self.stores[:-1]:
            store.reserve(slots, store.longest)
        last.reserve(slots, last.longest if self.split else width)

    def of(
        self, layer: int, key: Tensor, value: Tensor, width: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the stores of a layer up to this column: the first column, keys and values."""
        start = 0
        for store in self.stores:
            if start < width:
                yield start, *store.of(layer, key, value)
            start += store.width

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole slots over others."""
        for store in self.stores:
            store.move(sources, targets)

    def lies(self) -> tuple[int, ...]:
        """Return the addresses and sizes, which change whenever room has grown."""
        return tuple(place for store in self.stores for place in store.lies())


class Prefill:
    """Prompts one after another in a packed row, each attending to itself.

    Args:
        store: receives their keys and values.
        slots: of the prompts in the store.
        lengths: of the prompts; neighbours of one length are computed together.
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
    """The newest tokens of every row, attending to its prompt and to its own earlier tokens.

    Row r is in slot r of `own`, prompt g in slot g of `prompts`. One softmax is over both.
    """

    prompts: KeyValues
    own: Spans
    columns: Tensor | int  # (N,) of each token in its row's slot, or one for all
    members: Tensor  # (G,M) the rows of each prompt, filled up with any row
    places: Tensor  # (R,) of each row in `members`, flattened
    prompt_width: int  # P, the columns of `bias` that are of prompts
    bias: Tensor  # (R,W,P+T) `bias` of the prompt's and the row's tokens for each new one
    grid: "Grid | None" = None  # None: each row has one new token
    # By first column of a span, the same for all layers.
    _targets: dict[int, tuple[Tensor | None, Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, count = key.shape[:2]
        rows, width, both = self.bias.shape
        prompt = self.prompt_width
        spans = list(self._written(layer, key, value, rows, both - prompt))
        keys, values = (x[: len(self.members)] for x in self.prompts.of(layer, key, value))
        # Query heads that share a key head become additional queries of it: (N,K,H/K,D).
        q = query.view(heads, -1, count, query.shape[2]).permute(2, 0, 1, 3)
        if self.grid is not None:
            q = q[self.grid.tokens].transpose(1, 2).flatten(2, 3)  # (R,K,W*H/K,D)
        of_prompts = _product(self._by_prompt(q), keys[:, :, :prompt].transpose(2, 3))
        own = [_product(q, span.transpose(2, 3)) for span, _ in spans]
        scores = torch.cat([self._by_row(of_prompts, q.shape[2]), *own], dim=3)
        scores = scores.view(rows, heads, width, -1, both)
        weights = torch.add(self.bias[:, None, :, None], scores, alpha=scale).softmax(dim=4)
        weights = weights.flatten(2, 3)
        of_prompts = _product(self._by_prompt(weights[..., :prompt]), values[:, :, :prompt])
        out = self._by_row(of_prompts, q.shape[2])
        sizes = [prompt, *(span.shape[2] for span, _ in spans)]
        for part, (_, span) in zip(weights.split_with_sizes(sizes, 3)[1:], spans, strict=True):
            out += _product(part, span)
        out = out.to(query.dtype)
        if self.grid is None:
            return out.flatten(1, 2)
        out = out.view(rows, heads, width, -1, out.shape[3]).transpose(1, 2)
        return out.flatten(0, 1)[self.grid.back].flatten(1, 2)

    def _written(
        self, layer: int, key: Tensor, value: Tensor, rows: int, width: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Write (K,N,D) into their slots, and yield what is to be read, span by span."""
        for start, keys, values in self.own.of(layer, key, value, width):
            for store, new in ((keys, key), (values, value)):
                self._write(store, new.transpose(0, 1), start)
            yield keys[:rows, :, : width - start], values[:rows, :, : width - start]

    def _write(self, store: Tensor, new: Tensor, start: int) -> None:
        """Write (N,K,D) where the span from column `start` on has their columns."""
        columns, size = self.columns, store.shape[2]
        if isinstance(columns, int):  # a slice is written faster
            if start <= columns < start + size:
                store[: len(new), :, columns - start] = new
            return
        if start not in self._targets:
            self._targets[start] = self._target(columns, start, size)
        tokens, rows, places = self._targets[start]
        if len(rows):
            store[rows, :, places] = new if tokens is None else new[tokens]

    def _target(
        self, columns: Tensor, start: int, size: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return which tokens (None: all) are written into a span, and their rows and places."""
        grid = self.grid
        rows = torch.arange(len(columns), device=columns.device) if grid is None else grid.rows
        inside = (columns >= start) & (columns < start + size)
        if not self.own.split or inside.all():
            return None, rows, columns - start
        tokens = inside.nonzero().flatten()
        return tokens, rows[tokens], columns[tokens] - start

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Return (G,K,M*Q,...) from (R,K,Q,...): the queries of all rows of each prompt."""
        return x[self.members].transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor, queries: int) -> Tensor:
        """Undo what `_by_prompt` does."""
        parted = x.view(*x.shape[:2], -1, queries, x.shape[3]).transpose(1, 2)
        return parted.flatten(0, 1)[self.places]


class Grid(NamedTuple):
    """The places of the N tokens of a pass in rows that have up to W each."""

    tokens: Tensor  # (R,W) of each row, filled up with its last
    rows: Tensor  # (N,) the slot of each token's row
    steps: Tensor  # (N,) the place of each token in its row
    back: Tensor  # (N,) the place of each token in `tokens`, flattened

    @classmethod
    def of(cls, widths: Sequence[int]) -> "Grid":
        """Lay out rows with so many tokens each."""
        counts = torch.tensor(widths)
        most = int(counts.max())
        starts = counts.cumsum(0) - counts
        rows = torch.arange(len(widths)).repeat_interleave(counts)
        steps = torch.arange(len(rows)) - starts[rows]
        tokens = starts[:, None] + torch.minimum(torch.arange(most), counts[:, None] - 1)
        return cls(tokens, rows, steps, rows * most + steps)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores: 0 where the mask is True, minus infinity elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed and returned in at least float32; `b` is the stored tensor."""
    wide = torch.promote_types(b.dtype, torch.float32)
    if b.dtype == wide:
        return a.to(wide) @ b
    if b.is_cuda:
        flat: Tensor = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=wide)
        return flat.view(*b.shape[:2], *flat.shape[1:])
    return a.to(wide) @ b.to(wide)
