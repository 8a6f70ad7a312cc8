"""The attention of sampling, where prompts are computed once for all their rows.

Attention has two parts: over a prompt's keys and values, stored once, and over each row's own. With
a window of w tokens only the last w - 1 of a prompt are stored, and the last w of a row, in a ring:
attention does not depend on their order, since positions are part of the keys.

Shapes: R rows being sampled, of G prompts, at most M rows per prompt; N tokens of a pass, H query
and K key-value heads, D their width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_pg.masking import widen
from rlhf_pg.models.attention import AttentionOptions, fused_on_cpu
from rlhf_pg.models.prefix_tree import PrefixTree, split_sequences
from rlhf_pg.models.recurrent import Mixer
from rlhf_pg.rollout.native.cache import KeyValues, StateStore


class Members:
    """The rows of each prompt.

    Args:
        groups: the rows of each prompt, G lists of at most M.
        lengths: the tokens of each prompt.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        most = max(map(len, groups))
        padded = list[list[int]]()
        row_slots = [0] * sum(map(len, groups))
        for group in groups:
            first = most * len(padded)
            for row_slot, row in enumerate(group, first):
                row_slots[row] = row_slot
            missing = most - len(group)
            padded.append([*group, *[0] * missing])  # any row
        self.padded = torch.tensor(padded, device=device)
        self.row_slots = torch.tensor(row_slots, device=device)
        of_prompts = torch.tensor(lengths)
        columns = torch.arange(max(lengths))
        seen = columns < of_prompts[:, None]
        self.seen = seen.to(device)  # (G,P)
        prompts = [row_slot // most for row_slot in row_slots]
        self.lengths = of_prompts[prompts]  # of the prompt of each row


class _Run(NamedTuple):
    """Neighbouring prompts of equal length, which are computed together."""

    slots: list[int]
    start: int
    length: int  # of each

    @property
    def tokens(self) -> slice:
        """Where all of them are in the packed row."""
        size = len(self.slots) * self.length
        return slice(self.start, self.start + size)


@dataclass(eq=False)
class Prefill:
    """Prompts one after another in a packed row, each attending to itself.

    Args:
        store: receives their keys and values.
        states: receives their states.
        slots: the prompts' slots in both.
        lengths: the prompts' lengths; neighbours of equal length are computed together.
    """

    store: KeyValues
    states: StateStore
    slots: Sequence[int]
    lengths: Sequence[int]
    device: torch.device

    def __post_init__(self) -> None:
        self.size = 0
        self.runs = list[_Run]()
        for slot, length in zip(self.slots, self.lengths, strict=True):
            if not self.runs or self.runs[-1].length != length:
                run = _Run([], self.size, length)
                self.runs.append(run)
            self.runs[-1].slots.append(slot)
            self.size += length

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        window = options.window
        limit = _kept(window)
        keys, values = self.store.of(layer, key, value, limit)
        is_plain = options.sinks is None and options.softcap is None
        is_plain &= window is None or window >= max(self.lengths)
        parts = []
        for run in self.runs:
            q, k, v = (
                split_sequences(x[:, run.tokens], len(run.slots)) for x in (query, key, value)
            )
            kept = run.length
            if window is not None:
                kept = min(kept, window - 1)
            dropped = run.length - kept
            slots = torch.tensor(run.slots, device=q.device)
            keys[slots, :, :kept] = k[:, :, dropped:]
            values[slots, :, :kept] = v[:, :, dropped:]
            if is_plain:
                copies = q.shape[1] // k.shape[1]  # query heads that share a key head
                out = scaled_dot_product_attention(
                    q,
                    k.repeat_interleave(copies, dim=1),
                    v.repeat_interleave(copies, dim=1),
                    is_causal=True,
                    scale=options.scale,
                )
                out = out.transpose(1, 2)
                parts.append(out.flatten(0, 1))
        if is_plain:
            return torch.cat(parts)
        return self._tree.attend(layer, query, key, value, options)

    @cached_property
    def _tree(self) -> PrefixTree:
        segments = [(-1, length) for length in self.lengths]
        return PrefixTree(segments, self.device)

    def mix(self, mixer: Mixer) -> Tensor:
        outputs = []
        layer = mixer.recurrent.layer
        tokens = torch.arange(self.size, device=self.device)
        for run in self.runs:
            rows = tokens[run.tokens]
            rows = rows.view(-1, run.length)
            output, states = mixer(rows, {})
            self.states.write(layer, run.slots, states)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)


class PartialSoftmax(NamedTuple):
    """Attention over one part of the keys, for `together`; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


class Seen(NamedTuple):
    """What the newest tokens see, as additive bias: 0, or minus infinity elsewhere."""

    prompt: Tensor  # (G,1,1,P), or (G,M,P) if rows of a prompt see different parts
    row: Tensor  # (R,1,1,T) of the tokens written so far
    newest: tuple[Tensor | slice, slice, Tensor | int]  # where those are written, (R,K,D)


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
        device = members.row_slots.device
        longest = int(last.max()) + 1
        columns = last
        prompt = bias(members.seen, self.dtype)
        prompt = prompt[:, None, None]
        if window is not None:
            columns = last % window
            longest = min(longest, window)
            kept = members.lengths.clamp(max=window - 1)
            kept = kept[:, None]
            width = max(int(kept.max()), 1)
            column = torch.arange(width)
            # A token in column c of the kept ones is kept - c tokens before the row's first.
            is_near = last[:, None] + kept - column < window
            seen = (column < kept) & is_near
            prompt = bias(seen.to(device), self.dtype)
            prompt = prompt[members.padded]
        written = torch.arange(longest) <= last[:, None]
        row = bias(written.to(device), self.dtype)
        return Seen(
            prompt,
            row[:, None, None],
            self._slots_of(columns),
        )

    def _slots_of(self, columns: Tensor) -> tuple[Tensor | slice, slice, Tensor | int]:
        """Return the index of the newest tokens, given the column of each."""
        first = int(columns[0])
        if (columns == first).all():  # a slice is written faster
            return slice(self.size), slice(None), first
        device = self.members.row_slots.device
        rows = torch.arange(self.size, device=device)
        return rows, slice(None), columns.to(device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        window = options.window
        seen = self.seen(window)
        keys, values = self.own.of(layer, key, value, window)
        keys[seen.newest] = key.transpose(0, 1)
        values[seen.newest] = value.transpose(0, 1)
        # Query heads that share a key head become additional queries of it.
        query = torch.unflatten(query, 0, (len(key), -1))
        query = query.permute(2, 0, 1, 3)  # (R,K,H/K,D)
        to_row = _attend(query, keys, values, seen.row, options)
        limit = _kept(window)
        keys, values = self.prompts.of(layer, key, value, limit)
        to_prompt = self._attend_to_prompts(query, keys, values, seen.prompt, options)
        out = together(to_prompt, to_row)
        if options.sinks is not None:
            logsum = torch.logaddexp(to_prompt.logsum, to_row.logsum)
            sinks = options.sinks.view(len(key), -1, 1)
            share = torch.sigmoid(logsum - sinks)
            out = out * share
        out = out.flatten(1, 2)
        return out.to(query.dtype)

    def _attend_to_prompts(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        options: AttentionOptions,
    ) -> PartialSoftmax:
        """Attend with query (R,K,H/K,D), prompt by prompt."""
        shared = query.shape[2]
        query = query[self.members.padded]  # (G,M,K,H/K,D)
        query = query.transpose(1, 2).flatten(2, 3)
        if seen.dim() == 3:
            seen = seen.repeat_interleave(shared, dim=1)
            seen = seen[:, None]
        out, logsum = _attend(query, keys, values, seen, options)
        if options.window is not None:  # a row may see nothing of its prompt any more
            is_hidden = seen == -torch.inf
            blind = is_hidden.all(-1, keepdim=True)
            out = out.masked_fill(blind, 0)
            logsum = logsum.masked_fill(blind, -torch.inf)

        def of_rows(x: Tensor) -> Tensor:
            x = torch.unflatten(x, 2, (-1, shared))
            x = x.transpose(1, 2)  # (G,M,K,H/K,...)
            return x.flatten(0, 1)[self.members.row_slots]

        return PartialSoftmax(of_rows(out), of_rows(logsum))

    def mix(self, mixer: Mixer) -> Tensor:
        layer = mixer.recurrent.layer
        device = self.members.row_slots.device
        rows = torch.arange(self.size, device=device)
        before = self.states.of(layer, self.size)
        output, after = mixer(rows[:, None], before)
        self.states.replace(layer, after)
        return output[:, 0]


def _kept(window: int | None) -> int | None:
    """Return how many tokens of a prompt the tokens after it may see."""
    if window is None:
        return None
    return max(window - 1, 1)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an additive bias: 0 where it is True, minus infinity elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    zeros = torch.zeros_like(mask, dtype=wide)
    return zeros.masked_fill_(~mask, -torch.inf)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    options: AttentionOptions,
) -> PartialSoftmax:
    """Attend with query (B,K,Q,D) to B slots, with a bias (B,1,Q or 1,W) added to the scores."""
    slots = len(bias)
    width = bias.shape[-1]
    keys = keys[:slots, :, :width]
    values = values[:slots, :, :width]
    is_fused = keys.device.type == "cpu" and options.softcap is None
    is_fused &= keys.dtype == bias.dtype
    is_fused &= keys.shape == values.shape
    if is_fused:
        out, logsum = fused_on_cpu(
            query,
            keys,
            values,
            attn_mask=bias,
            scale=options.scale,
        )
        return PartialSoftmax(out, logsum[..., None])
    scores = widen(query) @ widen(keys).transpose(2, 3)
    if options.softcap is None:
        scores = torch.add(bias, scores, alpha=options.scale)
    else:
        scores = torch.tanh(scores * options.scale / options.softcap)
        scores = options.softcap * scores + bias
    logsum = scores.logsumexp(dim=-1, keepdim=True)
    weights = scores.sub_(logsum).exp_()
    return PartialSoftmax(weights @ widen(values), logsum)


def together(a: PartialSoftmax, b: PartialSoftmax) -> Tensor:
    """Combine both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    share = torch.sigmoid(b.logsum - a.logsum)
    return torch.lerp(a.values, b.values, share)
