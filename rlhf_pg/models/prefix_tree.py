"""The attention and the recurrence of packed rows, which hold trees of segments.

Depth-first, all that continues a segment is one slice after it. So the softmax of a token has a
part for each segment on its way to the root, and the parts are weighted by their sums (online
softmax; Milakov and Gimelshein 2018). With outputs o and log-sums of exponentials l:

    l = log(e^l_own + e^l_parent),    o = e^(l_own - l) o_own + e^(l_parent - l) o_parent

A sink s is a part without a value: l = log(e^l + e^s), o = e^(l_before - l) o_before. With the
combined o and l, the backward pass of each part is the ordinary one (FlashAttention-2; Dao 2023,
section 3.1): e^(scores - l) and D = rowsum(dO * O) belong to the whole softmax. A GPU uses one
FlexAttention kernel, or a mask where that fails.

A recurrent mixer starts a segment from the state at the end of its parent.

Shapes: N tokens, H query and K key-value heads, D their width.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from rlhf_pg.data.batch import pad_rows, to_device
from rlhf_pg.models.attention import (
    AttentionOptions,
    explicit_attention,
    fused_on_cpu,
    runs_on_device,
)
from rlhf_pg.models.recurrent import Mixer, States

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# For all kinds of heads, passes and masks. Beyond this limit torch would compute every score.
RECOMPILATIONS = 64
STRIP = 1024  # queries per pass when making the block mask
STRIP_OF_WINDOW = 256  # queries per pass of the CPU kernel with a window
KV_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NARROWEST = 16  # smallest head width of the kernel; zero padding changes no score
# Beyond this many repeated tokens, a mixer computes a segment once, on its own.
REPEATED = 128


class Span(NamedTuple):
    """Where a segment is in a packed row, with all that continues it right behind."""

    start: int
    stop: int
    leave: int  # where all that continues it stops
    parent: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class _Block(NamedTuple):
    """Queries and their keys, in neighbouring sequences of equal length, each with its own keys."""

    queries: slice
    keys: slice
    sequences: int
    is_own: bool  # queries and keys are the same tokens; otherwise a segment and what continues it
    # With a window, both are parts of each sequence, seen in full or by the `mask` of the window.
    rows: slice = slice(None)
    columns: slice = slice(None)
    window: int | None = None

    @property
    def has_fused_mask(self) -> bool:
        """Whether the kernel hides later tokens itself."""
        return self.is_own and self.window is None

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the part of (H,N,D) that belongs to the queries, (sequences,H,length,D)."""
        return split_sequences(x[:, self.queries], self.sequences)[:, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the same for the keys."""
        return split_sequences(x[:, self.keys], self.sequences)[:, :, self.columns]


class MixerPart(NamedTuple):
    """Rows that a mixer computes together."""

    tokens: Tensor  # (R,L) indices into the packed row, padded on the right
    continues: Tensor | None  # (R,) rows of earlier parts, numbered across all parts; or None
    is_continued: bool  # the rows are of equal length, and their last states are kept


class _MixerRow(NamedTuple):
    """What a mixer computes up to the end of a segment."""

    tokens: list[int]
    start: int  # the number of the kept segment that these follow, or -1


class PrefixTree:
    """A `Layout` for a packed row of trees, given the parent of each segment, which is before it or
    -1, and its length. The row is in depth-first order; `spans` are in the order given.
    """

    def __init__(self, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.device = device
        self.spans = list[Span]()
        self.firsts = list[int]()  # positions of the first tokens of segments on their paths
        self._masks = dict[int | None, BlockMask]()
        self._mixing = dict[tuple[bool, bool], tuple[list[MixerPart], Tensor]]()
        self._blocks = dict[int | None, list[_Block]]()
        self.longest = 0  # path
        sizes = [*(length for _, length in segments), 0]  # with all that continues them
        for i in reversed(range(len(segments))):
            sizes[segments[i][0]] += sizes[i]
        free = [0] * len(sizes)  # the next index behind each; the last is that of roots
        for i, (parent, length) in enumerate(segments):
            start = free[parent]
            free[i] = start + length
            free[parent] = start + sizes[i]
            span = Span(start, free[i], free[parent], parent)
            first = 0
            if parent >= 0:
                first = self.firsts[parent] + self.spans[parent].length
            self.spans.append(span)
            self.firsts.append(first)
            self.longest = max(self.longest, first + length)
        self.size = free[-1]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        width = query.shape[2]
        attend = self.by_blocks
        if isinstance(query, FakeTensor):
            pass  # it only measures memory, of which the GPU kernel needs as much
        elif query.is_cuda:
            width = max(-(-width // 8) * 8, NARROWEST)  # every kernel takes this
            heads = (len(query), len(key), width)
            flex = flex_compiles(query.dtype, heads, query.device)
            attend = self.by_flex if flex else self.densely
        elif options.softcap is not None:  # the kernel of a CPU has none
            attend = self.densely

        def widen(x: Tensor) -> Tensor:
            missing = width - x.shape[2]
            return nn.functional.pad(x, (0, missing)) if missing else x

        out = attend(widen(query), widen(key), widen(value), options)
        return out[..., : value.shape[2]]

    def by_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend with the fused kernel of a CPU."""
        out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            query,
            key,
            value,
            options.sinks,
            options.scale,
            self,
            self.blocks(self.within(options.window)),
        )
        return out.transpose(0, 1)

    def by_flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend with one fused kernel that skips unseen keys (FlexAttention; Dong et al. 2024)."""
        attend: Any = compiled_flex() if query.is_cuda else flex_attention
        softcap = options.softcap
        sinks = options.sinks

        def cap(score: Tensor, *indices: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            out, extra = attend(
                query[None],
                key[None],
                value[None],
                score_mod=None if softcap is None else cap,
                block_mask=self.mask(self.within(options.window)),
                scale=options.scale,
                return_aux=AuxRequest(lse=sinks is not None),
                enable_gqa=len(query) != len(key),
                # Below 128 tokens inductor would choose a kernel that cannot use these blocks.
                kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
            )
        if sinks is not None:
            share = torch.sigmoid(extra.lse - sinks[:, None])
            out = out * share[..., None].to(out.dtype)
        of_tokens: Tensor = out[0].transpose(0, 1)
        return of_tokens

    def densely(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend tree by tree, with a mask that hides siblings."""
        parts = list[Tensor]()
        window = self.within(options.window)
        copies = len(query) // len(key)
        for root in sorted(span for span in self.spans if span.parent < 0):
            tree = slice(root.start, root.leave)
            index = torch.arange(root.start, root.leave, device=query.device)
            sees = (index[:, None] >= index) & (index[:, None] < self.leave[tree])
            if window is not None:
                positions = self.positions[tree]
                sees &= positions[:, None] - positions < window
            q = query[:, tree]
            k = key[:, tree]
            v = value[:, tree]
            if options.sinks is None and options.softcap is None:
                out = nn.functional.scaled_dot_product_attention(
                    q[None],
                    k[None],
                    v[None],
                    sees,
                    scale=options.scale,
                    enable_gqa=copies > 1,
                )[0]
            else:
                k = k.repeat_interleave(copies, dim=0)
                v = v.repeat_interleave(copies, dim=0)
                out = explicit_attention(q, k, v, sees, options)
            parts.append(out)
        return torch.cat(parts, dim=1).transpose(0, 1)

    def mix(self, mixer: Mixer) -> Tensor:
        """Run a mixer on the rows of each part, from the states that an earlier part has left."""
        recurrent = mixer.recurrent
        states = States()
        outputs = list[Tensor]()
        parts, order = self.mixing(recurrent.continues, recurrent.in_one_call)
        for part in parts:
            before: States | None = {} if part.is_continued else None
            if part.continues is not None:
                before = {key: x.index_select(0, part.continues) for key, x in states.items()}
            output, after = mixer(part.tokens, before)
            outputs.append(output.flatten(0, 1))
            if part.is_continued:
                for key, x in after.items():
                    states[key] = torch.cat([states[key], x]) if key in states else x
        return torch.cat(outputs).index_select(0, order)

    def blocks(self, window: int | None) -> list[_Block]:
        """Return all that tokens attend to within the window, first of all their own segments."""
        if window not in self._blocks:
            self._blocks[window] = list(_tree_blocks(self, window))
        return self._blocks[window]

    def bias(self, block: _Block, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores of a block, (queries,keys): 0 or minus infinity; None
        if only later tokens are hidden.
        """
        if block.window is None:
            return None
        positions = self.positions[None, :, None]
        q = block.of_queries(positions)[0, 0]
        k = block.of_keys(positions)[0, 0].T
        seen = (q >= k) & (q - k < block.window)
        zeros = torch.zeros_like(seen, dtype=dtype)
        return zeros.masked_fill_(~seen, -torch.inf)

    def mixing(self, continues: bool, in_one_call: bool) -> tuple[list[MixerPart], Tensor]:
        """Return what a recurrent mixer computes, in order, and the index (N,) of each token among
        its outputs. A segment that several follow is computed once and continued by them, if a
        mixer `continues` and this saves enough; else each of them repeats it. In one call all rows
        are one part.
        """
        key = continues, in_one_call
        if key not in self._mixing:
            self._mixing[key] = self._mix(*key)
        return self._mixing[key]

    def _mix(self, continues: bool, in_one_call: bool) -> tuple[list[MixerPart], Tensor]:
        rows, groups, kept = self._mixer_rows(continues, in_one_call)
        parts = list[MixerPart]()
        numbers = dict[int, int]()
        order = [-1] * self.size
        end = 0
        for group in groups:
            tokens, _ = pad_rows([rows[number].tokens for number in group], pad=0)
            if tokens.shape[1] == 1:  # continued, it would be taken for a step of sampling
                tokens = nn.functional.pad(tokens, (0, 1))
            for number in group:
                numbers[number] = len(numbers)
                for index, token in enumerate(rows[number].tokens, end):
                    order[token] = index
                end += tokens.shape[1]
            first = group[0]
            before = None
            if rows[first].start >= 0:
                before = torch.tensor([numbers[rows[number].start] for number in group])
                before = to_device(before, self.device)
            tokens = to_device(tokens, self.device)
            parts.append(MixerPart(tokens, before, first in kept))
        in_order = torch.tensor(order)
        return parts, to_device(in_order, self.device)

    def _mixer_rows(
        self, continues: bool, in_one_call: bool
    ) -> tuple[list[_MixerRow], list[list[int]], set[int]]:
        """Return a row for each segment, the numbers of those that are computed, grouped by part,
        and of those whose states are kept.
        """
        followers = Counter(span.parent for span in self.spans)
        rows = list[_MixerRow]()
        level = dict[int, int]()  # of kept segments
        kept = defaultdict[tuple[int, int], list[int]](list)  # by level and length
        # By whether they continue a state, and by length, so that padding adds little.
        last = defaultdict[tuple[bool, int], list[int]](list)
        for number, span in enumerate(self.spans):
            row = _MixerRow([], span.parent)
            if span.parent >= 0 and span.parent not in level:
                row = rows[span.parent]
            tokens = [*row.tokens, *range(span.start, span.stop)]
            rows.append(_MixerRow(tokens, row.start))
            length = len(tokens)
            repeated = (followers[number] - 1) * length
            can_be_kept = continues and length > 1 and not in_one_call
            if can_be_kept and repeated > REPEATED:
                level[number] = 1 + level.get(row.start, 0)
                kept[level[number], length].append(number)
            elif not followers[number]:
                size = 0 if in_one_call else math.ceil(2 * math.log2(length))
                last[row.start >= 0, size].append(number)
        groups = [kept[key] for key in sorted(kept)]
        groups += last.values()
        return rows, groups, set(level)

    def within(self, window: int | None) -> int | None:
        """Return a window, or None if it holds all that a token follows."""
        if window is None or window >= self.longest:
            return None
        return window

    @cached_property
    def leave(self) -> Tensor:
        """(N,) the end of the tokens that continue each token, and so see it."""
        starts, stops, leave, _ = torch.tensor(sorted(self.spans)).T
        of_tokens = leave.repeat_interleave(stops - starts)
        return to_device(of_tokens, self.device)

    @cached_property
    def host_positions(self) -> list[int]:
        """The number of tokens before each on its path."""
        positions = list[int]()
        for span, first in sorted(zip(self.spans, self.firsts, strict=True)):
            positions += range(first, first + span.length)
        return positions

    @cached_property
    def positions(self) -> Tensor:
        """(N,) the same on the device."""
        positions = torch.tensor(self.host_positions)
        return to_device(positions, self.device)

    def mask(self, window: int | None) -> BlockMask:
        """Return the block mask: a token sees itself and what it continues, within the window."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        leave = self.leave
        total = self.size
        positions = leave if window is None else self.positions

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            follows = (q >= k) & (q < leave[k])
            if window is None:
                return follows
            return follows & (positions[q] - positions[k] < window)

        def strip(start: int) -> Any:
            def sees_after(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return sees(batch, head, q + start, k)

            return create_block_mask(
                sees_after,
                None,
                None,
                min(STRIP, total - start),
                total,
                str(self.device),
            )

        # All queries at once would take several times N * N bytes.
        strips = [strip(start) for start in range(0, total, STRIP)]
        parts = dict[str, Any]()
        for name in KV_BLOCKS:
            tensors = [getattr(mask, name) for mask in strips]
            parts[name] = torch.cat(tensors, dim=2)
        return BlockMask.from_kv_blocks(
            **parts,
            mask_mod=sees,
            seq_lengths=(total, total),
        )


def _tree_blocks(tree: "PrefixTree", window: int | None) -> Iterator[_Block]:
    """Yield a causal block for each run of equally long segments with the same parent, then one in
    which all that continues a segment attends to it; with a window in strips of queries, without
    keys that are out of reach.
    """
    spans = sorted(tree.spans)
    for (_, length), run in groupby(spans, key=lambda span: (span.parent, span.length)):
        siblings = list(run)
        tokens = slice(siblings[0].start, siblings[-1].stop)
        block = _Block(tokens, tokens, len(siblings), is_own=True)
        if window is None or length <= window:
            yield block
            continue
        for start in range(0, length, STRIP_OF_WINDOW):
            stop = min(start + STRIP_OF_WINDOW, length)
            yield block._replace(
                rows=slice(start, stop),
                columns=slice(max(start - window + 1, 0), stop),
                window=window,
            )
    for start, stop, leave, _ in spans:
        if window is None:
            if leave > stop:
                yield _Block(slice(stop, leave), slice(start, stop), 1, is_own=False)
            continue
        keys = slice(max(stop - window + 1, start), stop)
        if keys.start == stop:
            continue
        for strip in range(stop, leave, STRIP_OF_WINDOW):
            queries = slice(strip, min(strip + STRIP_OF_WINDOW, leave))
            positions = tree.host_positions[queries]
            nearest = min(positions) - tree.host_positions[stop - 1]
            farthest = max(positions) - tree.host_positions[keys.start]
            block = _Block(queries, keys, 1, is_own=False)
            if farthest < window:
                yield block
            elif nearest < window:
                yield block._replace(window=window)


class _Attention(torch.autograd.Function):
    """Attention over the blocks of a packed row with the fused CPU kernel, (H,N,D)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        tree: "PrefixTree",
        blocks: list[_Block],
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(query.shape, dtype=wide)
        logsum = query.new_empty(query.shape[:2], dtype=wide)
        for block in blocks:
            bias = tree.bias(block, query.dtype)
            part, part_sum = fused_on_cpu(
                *_operands(block, query, key, value),
                0.0,
                block.has_fused_mask,
                attn_mask=bias,
                scale=scale,
            )
            outs = block.of_queries(out)
            sums = block.of_queries(logsum[..., None])[..., 0]
            if block.is_own:
                outs.copy_(part)
                sums.copy_(part_sum)
                continue
            if bias is not None:  # some queries see none of these keys
                blind = (bias == -torch.inf).all(-1)
                part = part.masked_fill(blind[..., None], 0)
                part_sum = part_sum.masked_fill(blind, -torch.inf)
            _add(outs, sums, part, part_sum)
        if sinks is not None:
            both = torch.logaddexp(logsum, sinks[:, None].to(wide))
            out.mul_((logsum - both).exp_()[..., None])
            logsum = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsum, sinks)
        ctx.scale = scale
        ctx.tree = tree
        ctx.blocks = blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsum, sinks = ctx.saved_tensors
        wide = logsum.dtype
        of_query, of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (query, key, value))
        for block in ctx.blocks:
            operands = _operands(block, query, key, value)
            # In bfloat16 this kernel rounds more, and takes up to three times longer.
            parts = _backward(
                block.of_queries(grad).to(wide),
                *(x.to(wide) for x in operands),
                block.of_queries(out).to(wide),
                block.of_queries(logsum[..., None])[..., 0],
                0.0,
                block.has_fused_mask,
                attn_mask=ctx.tree.bias(block, wide),
                scale=ctx.scale,
            )
            totals = (
                block.of_queries(of_query),
                block.of_keys(of_key),
                block.of_keys(of_value),
            )
            for total, part in zip(totals, parts, strict=True):
                copies = part.shape[1] // total.shape[1]  # per key head, see `_operands`
                if copies > 1:
                    part = part.unflatten(1, (-1, copies)).sum(2)
                total += part
        of_sinks = None
        if sinks is not None:  # their values are 0: ds = p (0 - D)
            share = (sinks[:, None].to(wide) - logsum).exp()
            dot = (grad.to(wide) * out.to(wide)).sum(-1)
            of_sinks = -(share * dot).sum(1).to(sinks.dtype)
        return (
            of_query.to(query.dtype),
            of_key.to(query.dtype),
            of_value.to(query.dtype),
            of_sinks,
            None,
            None,
            None,
        )


def _operands(
    block: _Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sequences,H,length,D) each; a key head is repeated for each of its query heads."""
    keys = block.of_keys(key)
    values = block.of_keys(value)
    copies = len(query) // len(key)
    if copies > 1:
        keys = keys.repeat_interleave(copies, dim=1)
        values = values.repeat_interleave(copies, dim=1)
    return block.of_queries(query), keys, values


def split_sequences(x: Tensor, count: int) -> Tensor:
    """Reshape (H,count * length,D) to (count,H,length,D)."""
    length = x.shape[1] // count
    sequences = x.view(len(x), count, length, x.shape[2])
    return sequences.transpose(0, 1)


def _add(
    out: Tensor,
    logsum: Tensor,
    part: Tensor,
    part_sum: Tensor,
) -> None:
    """Merge another part of the softmax into `out` (H,L,D) and `logsum` (H,L), in place."""
    both = torch.logaddexp(logsum, part_sum)
    share = (logsum - both).exp_()
    share_of_part = (part_sum - both).exp_()
    out.mul_(share[..., None])
    out.add_(part * share_of_part[..., None])
    logsum.copy_(both)


@cache
def flex_compiles(dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device) -> bool:
    """Return whether FlexAttention compiles for these heads (query, key, width); log if not."""
    query_heads, key_heads, width = heads
    query = torch.ones(query_heads, 160, width, dtype=dtype, device=device)
    key = query.new_ones(key_heads, 160, width)
    tree = PrefixTree([(-1, 150), (0, 10)], device)

    def act() -> None:
        if dtype == torch.float64:
            raise TypeError("it has no float64")
        # Separate hooks: under gradient checkpointing, its hooks would mistake the tensors saved
        # here for the layer's.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), hooks:
            query.requires_grad_()
            key.requires_grad_()
            out = tree.by_flex(query, key, key, AttentionOptions(1.0))
            torch.autograd.backward(out.sum())

    return runs_on_device(act, "FlexAttention is not available, attention uses the slower SDPA")


@cache
def compiled_flex() -> Any:
    """Compile FlexAttention on first use: importing the compiler takes a second."""
    return torch.compile(flex_attention, dynamic=True)
