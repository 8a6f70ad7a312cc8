"""The attention and the states of sampling, where prompts are computed once for all their rows.

Attention has two parts: over a prompt's keys and values, stored once, and over each row's own. With
a window of w tokens only the last w - 1 of a prompt are stored, and the last w of a row, in a ring:
attention does not depend on their order, since positions are part of the keys.

Shapes: R rows being sampled, of G prompts, at most M rows per prompt; N tokens of a pass, H query
and K key-value heads, D their width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_pg.models.attention import AttentionOptions, fused_on_cpu
from rlhf_pg.models.prefix_tree import PrefixTree
from rlhf_pg.models.recurrent import Key, Mixer


class KeyValues:
    """Keys and values of every layer in slots, (slots, K, width, D) each, with growing capacity.

    Args:
        spare: the most tokens of spare capacity.
        longest: the most tokens that a slot may hold.
    """

    def __init__(self, spare: int, longest: int) -> None:
        self.spare = spare
        self.longest = longest
        self.slots = self.width = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._limits: dict[int, int | None] = {}

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
        self.slots = slots
        self.width = wide
        for layer, (keys, values) in self._layers.items():  # one by one, to save memory
            limit = self._limits[layer]
            self._layers[layer] = (self._resize(keys, limit), self._resize(values, limit))

    def of(
        self, layer: int, key: Tensor, value: Tensor, limit: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the stores of a layer; new ones are made to fit key and value (K,N,D), with no
        more columns than its `limit`.
        """
        if layer not in self._layers:
            self._limits[layer] = limit
            self._layers[layer] = (self._empty(key, limit), self._empty(value, limit))
        return self._layers[layer]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole slots over others."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets] = tensor[sources]

    def _empty(self, like: Tensor, limit: int | None) -> Tensor:
        width = self.width if limit is None else min(self.width, limit)
        # Zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros(self.slots, like.shape[0], width, like.shape[2])

    def _resize(self, old: Tensor, limit: int | None) -> Tensor:
        new = self._empty(old[0], limit)
        slots = min(len(old), self.slots)
        width = min(old.shape[2], new.shape[2])
        new[:slots, :, :width] = old[:slots, :, :width]
        return new


class StateStore:
    """States of recurrent layers in slots."""

    def __init__(self) -> None:
        self._layers = dict[int, dict[Key, Tensor]]()

    def of(self, layer: int, rows: int) -> dict[Key, Tensor]:
        """Return the states in the first slots."""
        return {key: states[:rows] for key, states in self._layers[layer].items()}

    def write(self, layer: int, slots: Sequence[int], states: Mapping[Key, Tensor]) -> None:
        """Write the states of a layer, (slots,...) each."""
        stored = self._layers.setdefault(layer, {})
        for key, new in states.items():
            most = max(slots) + 1
            old = stored.get(key, new[:0])
            if most > len(old):
                stored[key] = new.new_zeros(max(most, 2 * len(old)), *new.shape[1:])
                stored[key][: len(old)] = old
            stored[key][list(slots)] = new

    def replace(self, layer: int, states: dict[Key, Tensor]) -> None:
        """Keep the states of all rows as they are given, without a copy."""
        self._layers[layer] = states

    def copy(self, other: "StateStore", sources: Sequence[int], start: int) -> None:
        """Copy slots of another store, one after another from `start`."""
        slots = range(start, start + len(sources))
        for layer, states in other._layers.items():
            index = list(sources)
            self.write(layer, slots, {key: state[index] for key, state in states.items()})

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots over others."""
        for states in self._layers.values():
            for state in states.values():
                state[targets] = state[sources]


class Members:
    """The rows of each prompt.

    Args:
        groups: the rows of each prompt, G lists of at most M.
        lengths: the tokens of each prompt.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
    ) -> None:
        most = max(len(group) for group in groups)
        of_rows = {row: (g, j) for g, rows in enumerate(groups) for j, row in enumerate(rows)}
        places = [of_rows[row] for row in range(len(of_rows))]
        self.padded = torch.tensor(  # with any row
            [[*group, *[0] * (most - len(group))] for group in groups], device=device
        )
        self.places = torch.tensor([g * most + j for g, j in places], device=device)
        self.lengths = torch.tensor([lengths[g] for g, _ in places])  # of the rows' prompts
        columns = torch.arange(max(lengths))
        self.seen = (columns < torch.tensor(lengths)[:, None]).to(device)  # (G,P)


class Prefill:
    """Prompts one after another in a packed row, each attending to itself.

    Args:
        store: receives their keys and values.
        states: receives their states.
        slots: the prompts' slots in both.
        lengths: the prompts' lengths; neighbours of equal length are computed together.
    """

    def __init__(
        self,
        store: KeyValues,
        states: StateStore,
        slots: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        self.store = store
        self.states = states
        self.lengths = lengths
        self.device = device
        self.size = sum(lengths)
        self.runs: list[tuple[list[int], int, int]] = []  # slots, first token, length of each
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            if self.runs and self.runs[-1][2] == length:
                self.runs[-1][0].append(slot)
            else:
                self.runs.append(([slot], start, length))
            start += length

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        window = options.window
        keys, values = self.store.of(layer, key, value, _kept(window))
        is_plain = options.sinks is None and options.softcap is None
        is_plain &= window is None or window >= max(self.lengths)
        parts = []
        for slots, start, length in self.runs:
            q, k, v = (
                x[:, start : start + len(slots) * length]
                .reshape(x.shape[0], len(slots), length, -1)
                .transpose(0, 1)
                for x in (query, key, value)
            )
            kept = length if window is None else min(length, window - 1)
            index = torch.tensor(slots, device=q.device)
            keys[index, :, :kept] = k[:, :, length - kept :]
            values[index, :, :kept] = v[:, :, length - kept :]
            if is_plain:
                copies = q.shape[1] // k.shape[1]  # query heads that share a key head
                k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale)
                parts.append(out.transpose(1, 2).flatten(0, 1))
        if is_plain:
            return torch.cat(parts)
        return self._tree.attend(layer, query, key, value, options)

    @cached_property
    def _tree(self) -> PrefixTree:
        return PrefixTree([(-1, length) for length in self.lengths], self.device)

    def mix(self, mixer: Mixer) -> Tensor:
        outputs = []
        for slots, start, length in self.runs:
            rows = torch.arange(start, start + len(slots) * length, device=self.device)
            output, states = mixer(rows.view(len(slots), length), {})
            self.states.write(mixer.recurrent.layer, slots, states)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)


class Seen(NamedTuple):
    """What the newest tokens see, as additive bias: 0, or minus infinity elsewhere."""

    prompt: Tensor  # (G,1,1,P), or (G,M,P) if rows of a prompt see different parts
    own: Tensor  # (R,1,1,T) of the tokens written so far
    columns: Tensor | int  # (R,) where each row's newest token is written, or one for all


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Row r is in slot r of `own` and of `states`, prompt g in slot g of `prompts`.
    """

    prompts: KeyValues
    own: KeyValues
    states: StateStore
    members: Members
    last: Tensor  # (R,) the number of each row's tokens before the newest, on the host
    dtype: torch.dtype  # of the model
    _seen: dict[int | None, Seen] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.last)

    def seen(self, window: int | None) -> Seen:
        """Return what is seen within a window."""
        if window not in self._seen:
            self._seen[window] = self._see(window)
        return self._seen[window]

    def _see(self, window: int | None) -> Seen:
        members = self.members
        last = self.last
        device = members.places.device
        longest = int(last.max()) + 1
        columns = last
        prompt = bias(members.seen, self.dtype)[:, None, None]
        if window is not None:
            columns = last % window
            longest = min(longest, window)
            kept = members.lengths.clamp(max=window - 1)[:, None]
            column = torch.arange(max(int(kept.max()), 1))
            # A token in column c of the kept ones is kept - c tokens before the row's first.
            within = (column < kept) & (last[:, None] + kept - column < window)
            prompt = bias(within.to(device), self.dtype)[members.padded]
        own = torch.arange(longest) <= last[:, None]
        together = bool((columns == columns[0]).all())  # a slice is written faster
        return Seen(
            prompt,
            bias(own.to(device), self.dtype)[:, None, None],
            int(columns[0]) if together else columns.to(device),
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        rows = query.shape[1]
        heads = key.shape[0]
        seen = self.seen(options.window)
        own_keys, own_values = self.own.of(layer, key, value, options.window)
        one = isinstance(seen.columns, int)
        index = slice(rows) if one else torch.arange(rows, device=query.device)
        own_keys[index, :, seen.columns] = key.transpose(0, 1)
        own_values[index, :, seen.columns] = value.transpose(0, 1)
        keys, values = self.prompts.of(layer, key, value, _kept(options.window))
        # Query heads that share a key head become additional queries of it: (R,K,H/K,D).
        q = query.view(heads, -1, rows, query.shape[2]).permute(2, 0, 1, 3)
        own = _attend(q, own_keys, own_values, seen.own, options)
        of_prompt = q[self.members.padded].transpose(1, 2)  # (G,K,M,H/K,D)
        most, shared = of_prompt.shape[2:4]
        of_members = seen.prompt
        if of_members.dim() == 3:
            of_members = of_members.repeat_interleave(shared, dim=1)[:, None]
        prompt = _attend(of_prompt.flatten(2, 3), keys, values, of_members, options)
        if options.window is not None:  # a row may see nothing of its prompt any more
            blind = (of_members == -torch.inf).all(-1, keepdim=True)
            prompt = PartialSoftmax(
                prompt.values.masked_fill(blind, 0), prompt.logsum.masked_fill(blind, -torch.inf)
            )
        back = PartialSoftmax(
            *(
                x.view(-1, heads, most, shared, x.shape[3])
                .transpose(1, 2)
                .flatten(0, 1)[self.members.places]
                for x in prompt
            )
        )
        out = together(back, own)
        if options.sinks is not None:
            logsum = torch.logaddexp(back.logsum, own.logsum)
            out = out * torch.sigmoid(logsum - options.sinks.view(heads, shared, 1))
        return out.flatten(1, 2).to(query.dtype)

    def mix(self, mixer: Mixer) -> Tensor:
        rows = torch.arange(self.size, device=self.members.places.device)
        layer = mixer.recurrent.layer
        output, states = mixer(rows[:, None], self.states.of(layer, self.size))
        self.states.replace(layer, states)
        return output[:, 0]


def _kept(window: int | None) -> int | None:
    """Return how many tokens of a prompt the tokens after it may see."""
    if window is None:
        return None
    return max(window - 1, 1)


class PartialSoftmax(NamedTuple):
    """Attention over one part of the keys, for `together`; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an additive bias: 0 where it is True, minus infinity elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, options: AttentionOptions
) -> PartialSoftmax:
    """Attend with query (B,K,Q,D) to B slots, with a bias (B,1,Q or 1,W) added to the scores."""
    slots = len(bias)
    width = bias.shape[-1]
    keys = keys[:slots, :, :width]
    values = values[:slots, :, :width]
    is_fused = keys.device.type == "cpu" and options.softcap is None
    if is_fused and keys.dtype == bias.dtype and keys.shape == values.shape:
        out, logsum = fused_on_cpu(query, keys, values, attn_mask=bias, scale=options.scale)
        return PartialSoftmax(out, logsum[..., None])
    scores = _product(query, keys.transpose(2, 3))
    if options.softcap is None:
        scores = torch.add(bias, scores, alpha=options.scale)
    else:
        scores = options.softcap * torch.tanh(scores * options.scale / options.softcap) + bias
    logsum = scores.logsumexp(dim=-1, keepdim=True)
    return PartialSoftmax(_product(scores.sub_(logsum).exp_(), values), logsum)


def together(a: PartialSoftmax, b: PartialSoftmax) -> Tensor:
    """Combine both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    return torch.lerp(a.values, b.values, torch.sigmoid(b.logsum - a.logsum))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed in at least float32; `b` is the stored tensor."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
