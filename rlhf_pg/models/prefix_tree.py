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

import logging
import math
from collections import Counter
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
from rlhf_pg.models.attention import AttentionOptions, explicit_attention, fused_on_cpu
from rlhf_pg.models.recurrent import Key, Mixer

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# For all kinds of heads, passes and masks. Beyond this limit torch would compute every score.
RECOMPILATIONS = 64
STRIP = 1024  # queries per pass when making the block mask
STRIP_OF_WINDOW = 256  # queries per pass of the CPU kernel with a window
KV_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NARROWEST = 16  # smallest head width of the kernel; zero padding changes no score
# The repeated tokens beyond which a mixer computes a segment apart, once.
REPEATED = 128

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """The place of a segment in a packed row, with all that continues it right behind."""

    start: int
    stop: int
    leave: int  # where all that continues it stops
    parent: int


class _Block(NamedTuple):
    """Keys that queries attend to: of neighbouring sequences of equal length each its own share."""

    queries: slice
    keys: slice
    sequences: int
    is_own: bool  # queries and keys are the same tokens; otherwise a segment and what continues it
    # With a window, both are parts of each sequence, seen in full or by the `mask` of the window.
    rows: slice = slice(None)
    columns: slice = slice(None)
    window: int | None = None


class MixerPart(NamedTuple):
    """Rows that a mixer computes together."""

    tokens: Tensor  # (R,L) indices into the packed row, padded on the right
    continues: Tensor | None  # (R,) numbers of rows of earlier parts, all of them counted; or none
    is_continued: bool  # the rows are of equal length, and their last states are kept


class PrefixTree:
    """A `Layout` for a packed row of trees, given the parent of each segment, which is before it or
    -1, and its length. The row is in depth-first order; `spans` are in the order given.
    """

    def __init__(self, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.device, self.spans = device, list[Span]()
        self.firsts = list[int]()  # positions of the first tokens of segments on their paths
        self._masks = dict[int | None, BlockMask]()
        self._mixing = dict[tuple[bool, bool], tuple[list[MixerPart], Tensor]]()
        self._blocks = dict[int | None, list[_Block]]()
        sizes = [*(length for _, length in segments), 0]  # with all that continues them
        for i in reversed(range(len(segments))):
            sizes[segments[i][0]] += sizes[i]
        free = [0] * len(sizes)  # the next place behind each; the last is that of roots
        for i, (parent, length) in enumerate(segments):
            start = free[parent]
            free[i], free[parent] = start + length, start + sizes[i]
            self.spans.append(Span(start, free[i], free[parent], parent))
            before = 0 if parent < 0 else self.firsts[parent] + segments[parent][1]
            self.firsts.append(before)
        self.size = free[-1]
        self.longest = max(
            first + length for first, (_, length) in zip(self.firsts, segments, strict=True)
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        width = query.shape[2]
        attend = self.by_blocks
        if isinstance(query, FakeTensor):
            pass  # it only measures memory, of which the GPU kernel needs as much
        elif query.is_cuda:
            width = max(-(-width // 8) * 8, NARROWEST)  # every kernel takes this
            heads = (query.shape[0], key.shape[0], width)
            flex = flex_compiles(query.dtype, heads, query.device)
            attend = self.by_flex if flex else self.densely
        elif options.softcap is not None:  # the kernel of a CPU has none
            attend = self.densely
        q, k, v = (
            x if x.shape[2] == width else nn.functional.pad(x, (0, width - x.shape[2]))
            for x in (query, key, value)
        )
        return attend(q, k, v, options)[..., : value.shape[2]]

    def by_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend with the fused kernel of a CPU."""
        blocks = self.blocks(self.within(options.window))
        out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, options.sinks, options.scale, self, blocks
        )
        return out.transpose(0, 1)

    def by_flex(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
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
                enable_gqa=query.shape[0] != key.shape[0],
                # Below 128 tokens inductor would choose a kernel that cannot use these blocks.
                kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
            )
        if sinks is not None:
            out = out * torch.sigmoid(extra.lse - sinks[:, None])[..., None].to(out.dtype)
        of_tokens: Tensor = out[0].transpose(0, 1)
        return of_tokens

    def densely(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend tree by tree, with a mask that hides siblings."""
        parts = list[Tensor]()
        window = self.within(options.window)
        copies = query.shape[0] // key.shape[0]
        for start, _, stop, _ in sorted(span for span in self.spans if span.parent < 0):
            place = torch.arange(start, stop, device=query.device)
            leave = self.leave[start:stop]
            sees = (place[:, None] >= place) & (place[:, None] < leave)
            if window is not None:
                positions = self.positions[start:stop]
                sees &= positions[:, None] - positions < window
            q, k, v = (x[:, start:stop] for x in (query, key, value))
            if options.sinks is None and options.softcap is None:
                out = nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], sees, scale=options.scale, enable_gqa=copies > 1
                )[0]
            else:
                k, v = (x.repeat_interleave(copies, dim=0) for x in (k, v))
                out = explicit_attention(q, k, v, sees, options)
            parts.append(out)
        return torch.cat(parts, dim=1).transpose(0, 1)

    def mix(self, mixer: Mixer) -> Tensor:
        """Run a mixer on the rows of each part, from the states that an earlier part has left."""
        states = dict[Key, Tensor]()
        outputs = list[Tensor]()
        parts, order = self.mixing(mixer.recurrent.continues, mixer.recurrent.in_one_call)
        for part in parts:
            before: dict[Key, Tensor] | None = {} if part.is_continued else None
            if part.continues is not None:
                before = {key: x.index_select(0, part.continues) for key, x in states.items()}
            output, after = mixer(part.tokens, before)
            outputs.append(output.flatten(0, 1))
            if part.is_continued:
                states = {
                    key: torch.cat([states[key], x]) if key in states else x
                    for key, x in after.items()
                }
        return torch.cat(outputs).index_select(0, order)

    def blocks(self, window: int | None) -> list[_Block]:
        """Return all that tokens attend to within the window, first of all their own segments."""
        if window not in self._blocks:
            self._blocks[window] = list(_tree_blocks(self, window))
        return self._blocks[window]

    def bias(self, block: _Block, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores of a block, (queries,keys): 0 or minus infinity; None
        if all is seen that is not later.
        """
        if block.window is None:
            return None
        length = (block.queries.stop - block.queries.start) // block.sequences
        start = block.queries.start
        q = self.positions[start : start + length][block.rows, None]
        k = self.positions[block.keys][: length if block.is_own else None][block.columns]
        seen = (q >= k) & (q - k < block.window)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)

    def mixing(self, continues: bool, in_one_call: bool) -> tuple[list[MixerPart], Tensor]:
        """Return what a recurrent mixer computes, in order, and the place (N,) of each token among
        its outputs. A segment that several follow is computed once and continued by them, if a
        mixer `continues` and this saves enough; else each of them repeats it. In one call all rows
        are one part.
        """
        key = continues, in_one_call
        if key not in self._mixing:
            self._mixing[key] = self._mix(*key)
        return self._mixing[key]

    def _mix(self, continues: bool, in_one_call: bool) -> tuple[list[MixerPart], Tensor]:
        followers = Counter(span.parent for span in self.spans)
        rows = list[list[int]]()
        starts = list[int]()  # tokens since a kept segment, and its number
        level = dict[int, int]()  # of kept segments
        kept = dict[tuple[int, int], list[int]]()  # by level and length
        # By whether they continue a state, and by length, so that padding adds little.
        last = dict[tuple[bool, int], list[int]]()
        for number, span in enumerate(self.spans):
            repeats = span.parent >= 0 and span.parent not in level
            row = rows[span.parent] if repeats else []
            rows.append([*row, *range(span.start, span.stop)])
            starts.append(starts[span.parent] if repeats else span.parent)
            length = len(rows[number])
            can_be_kept = continues and length > 1 and not in_one_call
            if can_be_kept and (followers[number] - 1) * length > REPEATED:
                level[number] = 1 + level.get(starts[number], 0)
                kept.setdefault((level[number], length), []).append(number)
            elif not followers[number]:
                size = 0 if in_one_call else math.ceil(2 * math.log2(length))
                last.setdefault((starts[number] >= 0, size), []).append(number)
        parts = list[MixerPart]()
        numbers = dict[int, int]()
        order = [-1] * self.size
        end = 0
        for group in [kept[key] for key in sorted(kept)] + list(last.values()):
            tokens, _ = pad_rows([rows[number] for number in group], pad=0)
            if tokens.shape[1] == 1:  # continued, it would be taken for a step of sampling
                tokens = nn.functional.pad(tokens, (0, 1))
            for number in group:
                numbers[number] = len(numbers)
                for place, token in enumerate(rows[number], end):
                    order[token] = place
                end += tokens.shape[1]
            before = None
            if starts[group[0]] >= 0:
                before = torch.tensor([numbers[starts[number]] for number in group])
                before = to_device(before, self.device)
            parts.append(MixerPart(to_device(tokens, self.device), before, group[0] in level))
        return parts, to_device(torch.tensor(order), self.device)

    def within(self, window: int | None) -> int | None:
        """Return a window, or None if it holds all that a token follows."""
        if window is None or window >= self.longest:
            return None
        return window

    @cached_property
    def leave(self) -> Tensor:
        """(N,) the end of all that continues each token: what sees it."""
        lengths, leave = zip(
            *((x.stop - x.start, x.leave) for x in sorted(self.spans)), strict=True
        )
        return to_device(torch.tensor(leave).repeat_interleave(torch.tensor(lengths)), self.device)

    @cached_property
    def host_positions(self) -> list[int]:
        """The number of tokens before each on its path."""
        positions = list[int]()
        for span, first in sorted(zip(self.spans, self.firsts, strict=True)):
            positions += range(first, first + span.stop - span.start)
        return positions

    @cached_property
    def positions(self) -> Tensor:
        """(N,) the same on the device."""
        return to_device(torch.tensor(self.host_positions), self.device)

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

            sizes = min(STRIP, total - start), total
            return create_block_mask(sees_after, None, None, *sizes, str(self.device))

        # All queries at once would take several times N * N bytes.
        strips = [strip(start) for start in range(0, total, STRIP)]
        parts: Any = {k: torch.cat([getattr(s, k) for s in strips], 2) for k in KV_BLOCKS}
        return BlockMask.from_kv_blocks(**parts, mask_mod=sees, seq_lengths=(total, total))


def _tree_blocks(tree: "PrefixTree", window: int | None) -> Iterator[_Block]:
    """Yield a causal block for each run of segments of equal length that follow the same, then one
    to each segment from all that continues it; with a window in strips of queries, without keys
    that are out of reach.
    """
    spans = sorted(zip(tree.spans, tree.firsts, strict=True))
    for _, run in groupby(spans, key=lambda pair: (pair[0].parent, pair[0].stop - pair[0].start)):
        siblings = [span for span, _ in run]
        own = slice(siblings[0].start, siblings[-1].stop)
        length = siblings[0].stop - siblings[0].start
        if window is None or length <= window:
            yield _Block(own, own, len(siblings), is_own=True)
            continue
        for start in range(0, length, STRIP_OF_WINDOW):
            rows = slice(start, min(start + STRIP_OF_WINDOW, length))
            columns = slice(max(start - window + 1, 0), rows.stop)
            yield _Block(own, own, len(siblings), True, rows, columns, window)
    for (start, stop, leave, _), first in spans:
        if window is None:
            if leave > stop:
                yield _Block(slice(stop, leave), slice(start, stop), 1, is_own=False)
            continue
        keys = slice(max(stop - window + 1, start), stop)
        for strip in range(stop, leave, STRIP_OF_WINDOW):
            queries = slice(strip, min(strip + STRIP_OF_WINDOW, leave))
            places = [position - first + start for position in tree.host_positions[queries]]
            if keys.start < stop and min(places) - (stop - 1) < window:
                sees_all = max(places) - keys.start < window
                yield _Block(queries, keys, 1, False, window=None if sees_all else window)


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
            q, k, v = _operands(block, query, key, value)
            part, own = fused_on_cpu(
                q, k, v, 0.0, block.is_own and bias is None, attn_mask=bias, scale=scale
            )
            if bias is not None and not block.is_own:  # some queries see none of these keys
                blind = (bias == -torch.inf).all(-1)
                part = part.masked_fill(blind[..., None], 0)
                own = own.masked_fill(blind, -torch.inf)
            outs = split_sequences(out[:, block.queries], block.sequences)[:, :, block.rows]
            sums = split_sequences(logsum[:, block.queries, None], block.sequences)[
                :, :, block.rows, 0
            ]
            if block.is_own:
                outs.copy_(part)
                sums.copy_(own)
            else:
                _add(outs, sums, part, own)
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
        grads = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
        for block in ctx.blocks:
            bias = ctx.tree.bias(block, wide)
            grad_rows, out_rows, sums = (
                split_sequences(x[:, block.queries], block.sequences)[:, :, block.rows]
                for x in (grad, out, logsum[..., None])
            )
            # In bfloat16 this kernel rounds more, and takes up to three times longer.
            parts = _backward(
                grad_rows.to(wide),
                *(x.to(wide) for x in _operands(block, query, key, value)),
                out_rows.to(wide),
                sums[..., 0],
                0.0,
                block.is_own and bias is None,
                attn_mask=bias,
                scale=ctx.scale,
            )
            tokens = (block.queries, block.keys, block.keys)
            for total, place, inner, part in zip(
                grads, tokens, (block.rows, block.columns, block.columns), parts, strict=True
            ):
                copies = part.shape[1] // len(total)  # per key head, see `_operands`
                if copies > 1:
                    part = part.unflatten(1, (-1, copies)).sum(2)
                split_sequences(total[:, place], block.sequences)[:, :, inner] += part
        of_sinks = None
        if sinks is not None:  # their values are 0: ds = p (0 - D)
            share = (sinks[:, None].to(wide) - logsum).exp()
            of_sinks = -(share * (grad.to(wide) * out.to(wide)).sum(-1)).sum(1).to(sinks.dtype)
        return *(total.to(query.dtype) for total in grads), of_sinks, None, None, None


def _operands(block: _Block, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return (sequences,H,length,D) each; a key head is repeated for each of its query heads."""
    copies = query.shape[0] // key.shape[0]
    keys = (
        split_sequences(x[:, block.keys], block.sequences)[:, :, block.columns]
        for x in (key, value)
    )
    repeated = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in keys)
    return [split_sequences(query[:, block.queries], block.sequences)[:, :, block.rows], *repeated]


def split_sequences(x: Tensor, count: int) -> Tensor:
    """Reshape (H,count * length,D) to (count,H,length,D)."""
    return x.view(x.shape[0], count, x.shape[1] // count, x.shape[2]).transpose(0, 1)


def _add(out: Tensor, logsum: Tensor, part: Tensor, own: Tensor) -> None:
    """Merge another part of the softmax into `out` (H,L,D) and `logsum` (H,L), in place."""
    both = torch.logaddexp(logsum, own)
    out.mul_((logsum - both).exp_()[..., None]).add_(part * (own - both).exp_()[..., None])
    logsum.copy_(both)


@cache
def flex_compiles(dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device) -> bool:
    """Return whether FlexAttention compiles for these heads (query, key, width); log if not."""
    query, key = (torch.ones(h, 160, heads[2], dtype=dtype, device=device) for h in heads[:2])
    layout = PrefixTree([(-1, 150), (0, 10)], device)
    try:
        if dtype == torch.float64:
            raise TypeError("it has no float64")
        # Separate hooks: under gradient checkpointing, its hooks would mistake the tensors saved
        # here for the layer's.
        own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), own:
            query = query.requires_grad_()
            key = key.requires_grad_()
            torch.autograd.backward(layout.by_flex(query, key, key, AttentionOptions(1.0)).sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.warning("FlexAttention is not available, attention uses the slower SDPA: %s", reason)
        return False
    return True


@cache
def compiled_flex() -> Any:
    """Compile FlexAttention on first use: importing the compiler takes a second."""
    return torch.compile(flex_attention, dynamic=True)
