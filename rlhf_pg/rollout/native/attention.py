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

from rlhf_pg.data.batch import to_device
from rlhf_pg.models.attention import AttentionOptions, fused_on_cpu, wide_product
from rlhf_pg.models.prefix_tree import PrefixTree, split_sequences
from rlhf_pg.models.recurrent import Mixer
from rlhf_pg.rollout.native.cache import KeyValues, StateStore
from rlhf_pg.rollout.native.members import Members


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
        self.used = max(self.slots) + 1
        # For every layer, of each run.
        self.indices = [to_device(torch.tensor(run.slots), self.device) for run in self.runs]

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
        for run, slots in zip(self.runs, self.indices, strict=True):
            q, k, v = (
                split_sequences(x[:, run.tokens], len(run.slots)) for x in (query, key, value)
            )
            kept = run.length
            if window is not None:
                kept = min(kept, window - 1)
            dropped = run.length - kept
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
        for run, slots in zip(self.runs, self.indices, strict=True):
            rows = tokens[run.tokens]
            rows = rows.view(-1, run.length)
            output, states = mixer(rows, {})
            self.states.write(layer, slots, self.used, states)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)


class PartialSoftmax(NamedTuple):
    """Attention over one part of the keys, for `together`; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


@dataclass(eq=False)
class Seen:
    """What the newest tokens see within a window, as masks and as additive bias: 0, or minus
    infinity elsewhere.
    """

    members: Members
    of_prompt: Tensor | None  # (R,P) bool of a prompt's tokens; None: all
    of_row: Tensor  # (R,T) bool of the row's own tokens
    newest: tuple[Tensor | slice, slice, Tensor | int]  # where those are written, (R,K,D)
    dtype: torch.dtype

    @cached_property
    def prompt(self) -> Tensor:
        """The bias (G,1,1,P) of prompts, or (G,M,P) if rows of a prompt see different parts."""
        if self.of_prompt is None:
            return self._bias(self.members.seen)[:, None, None]
        return self._bias(self.of_prompt)[self.members.padded]

    @cached_property
    def row(self) -> Tensor:
        """The bias (R,1,1,T) of the rows' own tokens."""
        return self._bias(self.of_row)[:, None, None]

    @cached_property
    def both(self) -> Tensor:
        """The bias (R,1,1,P+T) of a prompt's tokens and the row's own."""
        of_prompt = self.members.seen_by_rows if self.of_prompt is None else self.of_prompt
        mask = torch.cat([of_prompt, self.of_row], dim=1)
        return self._bias(mask)[:, None, None]

    def _bias(self, mask: Tensor) -> Tensor:
        zeros = torch.zeros_like(mask, dtype=self.dtype)
        return zeros.masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Row r is in slot r of `own` and of `states`, prompt g in slot g of `prompts`. Everything is on
    the device, and nothing waits for it.
    """

    prompts: KeyValues
    own: KeyValues
    states: StateStore
    members: Members
    last: Tensor  # (R,) the number of each row's tokens before the newest
    longest: int  # the largest of them
    is_level: bool  # whether all are equal
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
        last = self.last[:, None]
        width = self.longest + 1
        column = self.longest
        columns = self.last
        of_prompt = None
        if window is not None:
            column %= window
            columns = columns % window
            width = min(width, window)
            kept = members.lengths.clamp(max=window - 1)
            kept = kept[:, None]
            most = max(min(members.longest, window - 1), 1)
            kept_column = torch.arange(most, device=last.device)
            # A token in column c of the kept ones is kept - c tokens before the row's first.
            is_near = last + kept - kept_column < window
            of_prompt = (kept_column < kept) & is_near
        written = torch.arange(width, device=last.device) <= last
        newest: tuple[Tensor | slice, slice, Tensor | int] = members.rows, slice(None), columns
        if self.is_level:  # a slice is written faster
            newest = slice(self.size), slice(None), column
        wide = torch.promote_types(self.dtype, torch.float32)
        return Seen(members, of_prompt, written, newest, wide)

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
        limit = _kept(window)
        prompts = self.prompts.of(layer, key, value, limit)
        # Query heads that share a key head become additional queries of it.
        query = torch.unflatten(query.transpose(0, 1), 1, (len(key), -1))  # (R,K,H/K,D)
        is_fused = key.device.type == "cpu" and options.softcap is None
        is_fused &= key.dtype == seen.dtype
        is_fused &= key.shape == value.shape
        attend = self._attend_in_parts if is_fused else self._attend_at_once
        out = attend(
            query,
            (keys, values),
            prompts,
            seen,
            options,
        )
        out = out.flatten(1, 2)
        return out.to(query.dtype)

    def _attend_at_once(
        self,
        query: Tensor,
        row_store: tuple[Tensor, Tensor],
        prompt_store: tuple[Tensor, Tensor],
        seen: Seen,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend with query (R,K,H/K,D) by one softmax over a prompt's tokens and the row's own.

        Keys and values are read in their own dtype, scores are in at least float32.
        """
        rows, key_heads, shared, depth = query.shape
        order = self.members.order(key_heads, shared)
        width = seen.of_row.shape[1]
        prompt_width = seen.both.shape[-1] - width
        keys, values = (_first(store, rows, width) for store in row_store)
        groups = len(self.members.padded)
        prompt_keys, prompt_values = (_first(store, groups, prompt_width) for store in prompt_store)
        query = query.reshape(-1, depth)
        to_prompt = order.by_prompt(query)
        to_prompt = wide_product(to_prompt, prompt_keys.transpose(1, 2))
        to_row = query.view(-1, shared, depth)
        to_row = wide_product(to_row, keys.transpose(1, 2))
        scores = torch.cat([order.by_row(to_prompt), to_row.flatten(0, 1)], dim=1)
        scores = scores.view(rows, key_heads, shared, -1)
        factor = options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores * (options.scale / options.softcap))
            factor = options.softcap
        scores = torch.add(seen.both, scores, alpha=factor)
        if options.sinks is not None:
            sinks = options.sinks.view(key_heads, shared, 1).to(scores)
            sinks = sinks.expand(rows, -1, -1, -1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)
        weights = weights.flatten(0, 2)
        to_prompt = order.by_prompt(weights[:, :prompt_width])
        to_row = weights[:, prompt_width : prompt_width + width]
        to_row = to_row.view(-1, shared, width)
        from_prompt = wide_product(to_prompt, prompt_values)
        from_row = wide_product(to_row, values)
        out = order.by_row(from_prompt) + from_row.flatten(0, 1)
        return out.view(rows, key_heads, shared, -1)

    def _attend_in_parts(
        self,
        query: Tensor,
        row_store: tuple[Tensor, Tensor],
        prompt_store: tuple[Tensor, Tensor],
        seen: Seen,
        options: AttentionOptions,
    ) -> Tensor:
        """Do the same by the CPU's fused kernel, which needs no room for scores."""
        to_row = _attend(
            query,
            *row_store,
            seen.row,
            options,
        )
        to_prompt = self._attend_to_prompts(
            query,
            *prompt_store,
            seen.prompt,
            options,
        )
        out = together(to_prompt, to_row)
        if options.sinks is not None:
            logsum = torch.logaddexp(to_prompt.logsum, to_row.logsum)
            sinks = options.sinks.view(query.shape[1], -1, 1)
            share = torch.sigmoid(logsum - sinks)
            out = out * share
        return out

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
        before = self.states.of(layer, self.size)
        output, after = mixer(self.members.rows[:, None], before)
        self.states.replace(layer, after)
        return output[:, 0]


def _kept(window: int | None) -> int | None:
    """Return how many tokens of a prompt the tokens after it may see."""
    if window is None:
        return None
    return max(window - 1, 1)


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
    out, logsum = fused_on_cpu(query, keys, values, attn_mask=bias, scale=options.scale)
    return PartialSoftmax(out, logsum[..., None])


def _first(store: Tensor, slots: int, width: int) -> Tensor:
    """Return the first slots and columns of a store (slots,K,width,D), one for each key head."""
    return store[:slots, :, :width].flatten(0, 1)


def together(a: PartialSoftmax, b: PartialSoftmax) -> Tensor:
    """Combine both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    share = torch.sigmoid(b.logsum - a.logsum)
    return torch.lerp(a.values, b.values, share)
