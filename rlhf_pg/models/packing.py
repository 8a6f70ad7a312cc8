"""Layouts of a batch for a model, packed or padded, and the attention of packed rows.

A packed row has no padding. It holds trees of segments, each of which continues its parent and does
not see its siblings: a prompt with its completions, or with the branches of an agent's histories.
Depth-first, all that continues a segment is one slice after it. So the softmax of a token has a
part for each segment on its way to the root, and the parts are weighted by their sums (online
softmax; Milakov and Gimelshein 2018). With outputs o and log-sums of exponentials l:

    l = log(e^l_own + e^l_parent),    o = e^(l_own - l) o_own + e^(l_parent - l) o_parent

With the combined o and l, the backward pass of each part is the ordinary one (FlashAttention-2;
Dao 2023, section 3.1): e^(scores - l) and D = rowsum(dO * O) belong to the whole softmax. A GPU
uses one FlexAttention kernel, or SDPA with a mask where that fails.

Shapes: B rows, P prompt width, T completion width; N computed tokens, H query and K key-value
heads, D their width.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import PreTrainedModel

from rlhf_pg.data.batch import Batch, RowLengths, pad_rows, to_device
from rlhf_pg.models.attention import (
    attention_support,
    configs_of,
    fused_on_cpu,
    replace_attention,
    window,
)
from rlhf_pg.models.lm_head import evaluating

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# For all kinds of heads, passes and masks. Beyond this limit torch would compute every score.
RECOMPILATIONS = 64
STRIP = 1024  # queries per pass when making the block mask
KV_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NARROWEST = 16  # smallest head width of the kernel; zero padding changes no score

logger = logging.getLogger(__name__)


class DecoderInput(NamedTuple):
    """The input of a `transformers` decoder for a batch, and where its states are in the output."""

    inputs: dict[str, Any]  # (rows, columns) each
    states: Tensor  # (B,T+1) of the N tokens: the one that each follows, and the last action
    rows: Tensor  # (N,) the number of rows with actions that share each token


class Hidden(NamedTuple):
    """The output of a trunk for a batch."""

    hidden: Tensor  # (N,width) last hidden states
    states: Tensor  # as in `DecoderInput`
    rows: Tensor  # as in `DecoderInput`
    router_logits: tuple[Tensor, ...] = ()  # (N,experts) per layer, if `routes`


def hidden_states(trunk: nn.Module, batch: Batch, window: float, routes: bool = False) -> Hidden:
    """Run a trunk over a batch, packed within the `window`, with router logits for `routes`."""
    packs = can_pack(batch, window)
    tokens = lay_out_packed(batch) if packs else lay_out_padded(batch)
    asked = {"output_router_logits": True} if routes else {}
    with replace_attention(configs_of(trunk)) if packs else nullcontext():
        output = trunk(**tokens.inputs, **asked, use_cache=False)
    logits = output.router_logits if routes else ()
    return Hidden(output.last_hidden_state.flatten(0, 1), tokens.states, tokens.rows, logits)


def can_pack(batch: Batch, window: float) -> bool:
    """Return whether a batch is packed."""
    return window == math.inf or batch.longest <= window


def packing_window(trunk: nn.Module, training: bool = False) -> float:
    """Return the longest packed row; 0 if attention has dropout or cannot be replaced."""
    if not isinstance(trunk, PreTrainedModel):
        return 0.0
    with evaluating(trunk):
        trunk.train(training)
        return window(trunk) if attention_support(trunk).unsupported_reason is None else 0.0


def lay_out_padded(batch: Batch) -> DecoderInput:
    """Lay prompts and completions side by side, (B,P+T), or each path of the trees in a row."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
    shares = (mask * batch.action_mask.any(1, keepdim=True)).flatten()
    places = torch.arange(mask.numel(), device=mask.device).view_as(mask)
    if batch.parent_offsets is not None:
        sources, mask, places = (to_device(x, mask.device) for x in _paths(batch))
        ids = ids.flatten()[sources]
        shares = shares.new_zeros(ids.numel()).scatter_add(0, places.flatten(), shares)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        # Positions count real tokens, not columns, which matters for absolute positions.
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    before = (torch.arange(mask.numel(), device=mask.device) - 1).clamp(min=0)
    states = _states(places, before, batch.action_ends, batch.prompt_ids.shape[1])
    return DecoderInput(inputs, states, shares)


def _paths(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the paths of all trees as indices into flattened (B,P+T), right-padded, their mask,
    and the first place of each token on them, (B,P+T); on the host.
    """
    rows = batch.with_counts().host_rows or ()
    segments = _segments(batch, [row._replace(family=i) for i, row in enumerate(rows)])
    ways, paths = list[list[int]](), list[list[int]]()
    inner = {segment.parent for segment in segments}
    for number, (parent, length, source, *_) in enumerate(segments):
        ways.append([*(ways[parent] if parent >= 0 else ()), *range(source, source + length)])
        paths += [] if number in inner else [ways[-1]]
    sources, mask = pad_rows(paths, pad=paths[0][0])  # the first place of this token is 0 anyway
    places = torch.zeros(len(rows) * batch.width, dtype=torch.int64)
    own = torch.arange(sources.numel())
    places = places.scatter_reduce(0, sources.flatten(), own, "amin", include_self=False)
    return sources, mask.long(), places.view(len(rows), -1)


def lay_out_packed(batch: Batch) -> DecoderInput:
    """Lay all real tokens one after another, (1,N), in the order of `PrefixTree`."""
    rows = batch.with_counts().host_rows or ()
    device, prompt = batch.completion_ids.device, batch.prompt_ids.shape[1]
    segments = _segments(batch, rows)
    tree = PrefixTree([segment[:2] for segment in segments], device)
    facts = [  # without a parent, any place would do as the one before
        (span.start, tree.spans[segment.parent].stop - 1, *segment[1:])
        for span, segment in zip(tree.spans, segments, strict=True)
    ]
    of_segments = torch.tensor(sorted(facts))
    of_tokens = of_segments.repeat_interleave(of_segments[:, 2], dim=0)
    starts, ends, _, sources, positions, shares = of_tokens.T
    place = torch.arange(len(starts))
    sources, positions = sources + place - starts, positions + place - starts
    places = torch.zeros(len(rows) * batch.width, dtype=torch.int64)
    places = places.scatter(0, sources, place).view(len(rows), -1)
    firsts = dict[int, int]()
    shared = [firsts.setdefault(row.family, i) for i, row in enumerate(rows)]
    places[:, prompt - 1] = places[shared, prompt - 1]
    before = torch.where(place == starts, ends, place - 1)
    states = _states(places, before, torch.tensor([row.end for row in rows]), prompt)
    together = to_device(torch.cat([sources, positions, shares, states.flatten()]), device)
    sources, positions, shares, flat = together.tensor_split([len(place) * i for i in (1, 2, 3)])
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).flatten()[sources]
    inputs = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids[None]),  # without it some models infer padding
        "position_ids": positions[None],
        "layout": tree,
    }
    return DecoderInput(inputs, flat.view_as(states), shares)


def _states(places: Tensor, before: Tensor, ends: Tensor, prompt: int) -> Tensor:
    """Return `DecoderInput.states`, given the place of each token (B,P+T), the place that each of
    the N computed tokens follows, `Batch.action_ends`, and P.
    """
    last = places.gather(1, ends[:, None] + (prompt - 1))
    return torch.cat([before[places[:, prompt:]], last], dim=1)


class Segment(NamedTuple):
    """Neighbouring tokens of a row, each of which follows the one before."""

    parent: int  # number of the segment whose end it follows, lower than its own; -1 for none
    length: int
    source: int  # index of its first token in flattened (B,P+T)
    position: int  # of its first token, on the path from the root
    shares: int  # as in `DecoderInput.rows`


def _segments(batch: Batch, rows: Sequence[RowLengths]) -> list[Segment]:
    """Cut rows at every branch, in order of creation; the prompt of a family is in its first."""
    firsts = dict[int, int]()
    # Row and column of the first token of each segment, and of the token that it follows.
    follows: dict[tuple[int, int], tuple[int, int] | None] = {}
    for i, row in enumerate(rows):
        first = firsts.setdefault(row.family, i)
        if first == i:
            follows[i, -row.prompt] = None
        jumps = {0: 1, **dict(row.jumps)} if row.completion else {}
        for column, offset in jumps.items():
            follows[i, column] = None
            if offset:
                before, end = i if offset <= column else first, column - offset
                follows[i, column] = before, end
                if end + 1 < rows[before].completion:
                    follows.setdefault((before, end + 1), (before, end))
    segments, numbers = list[Segment](), dict[tuple[int, int], int]()
    sharing = Counter(row.family for row in rows if row.actions)
    starts, prompt = sorted(follows), batch.prompt_ids.shape[1]
    for (i, column), (row_after, after) in zip(starts, [*starts[1:], (-1, 0)], strict=True):
        stop = after if row_after == i else rows[i].completion
        numbers[i, stop - 1] = len(segments)
        parent, position = -1, 0
        if (followed := follows[i, column]) is not None:
            parent = numbers[followed]
            position = segments[parent].position + segments[parent].length
        shares = sharing[rows[i].family] if column < 0 else int(rows[i].actions > 0)
        source = i * batch.width + prompt + column
        segments.append(Segment(parent, stop - column, source, position, shares))
    return segments


class Span(NamedTuple):
    """The place of a segment in a packed row, with all that continues it right behind."""

    start: int
    stop: int
    leave: int  # where all that continues it stops
    parent: int


class _Block(NamedTuple):
    """Neighbouring sequences of equal length, each attending to its share of the keys."""

    queries: slice
    keys: slice
    sequences: int
    causal: bool  # queries and keys are the same tokens; otherwise every query sees every key


class PrefixTree:
    """A `Layout` for a packed row of trees, given the parent of each segment, which is before it or
    -1, and its length. The row is in depth-first order; `spans` are in the order given.
    """

    def __init__(self, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.device, self.spans = device, list[Span]()
        sizes = [*(length for _, length in segments), 0]  # with all that continues them
        for i in reversed(range(len(segments))):
            sizes[segments[i][0]] += sizes[i]
        free = [0] * len(sizes)  # the next place behind each; the last is that of roots
        for i, (parent, length) in enumerate(segments):
            start = free[parent]
            free[i], free[parent] = start + length, start + sizes[i]
            self.spans.append(Span(start, free[i], free[parent], parent))
        self._blocks = list(_blocks(sorted(self.spans)))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        width, attend = query.shape[2], self.by_blocks
        # Fake tensors only measure memory, of which the GPU kernel needs as much.
        if query.is_cuda and not isinstance(query, FakeTensor):
            width = max(-(-width // 8) * 8, NARROWEST)  # every kernel takes this
            heads = (query.shape[0], key.shape[0], width)
            flex = flex_compiles(query.dtype, heads, query.device)
            attend = self.by_flex if flex else self.by_families
        q, k, v = (
            x if x.shape[2] == width else nn.functional.pad(x, (0, width - x.shape[2]))
            for x in (query, key, value)
        )
        return attend(q, k, v, scale)[..., : value.shape[2]]

    def by_blocks(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with the fused kernel of a CPU."""
        out: Tensor = _Attention.apply(query, key, value, scale, self._blocks)  # type: ignore[no-untyped-call]
        return out.transpose(0, 1)

    def by_flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with one fused kernel that skips unseen keys (FlexAttention; Dong et al. 2024)."""
        attend: Any = compiled_flex() if query.is_cuda else flex_attention
        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            out: Tensor = attend(
                query[None],
                key[None],
                value[None],
                block_mask=self.mask,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
                # Below 128 tokens inductor would choose a kernel that cannot use these blocks.
                kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
            )
        return out[0].transpose(0, 1)

    def by_families(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend tree by tree, with a mask that hides siblings."""
        parts = list[Tensor]()
        for start, _, stop, _ in sorted(span for span in self.spans if span.parent < 0):
            place, leave = torch.arange(start, stop, device=query.device), self.leave[start:stop]
            sees = (place[:, None] >= place) & (place[:, None] < leave)
            q, k, v = (x[None, :, start:stop] for x in (query, key, value))
            shares = query.shape[0] != key.shape[0]
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=sees, scale=scale, enable_gqa=shares
            )
            parts.append(out[0])
        return torch.cat(parts, dim=1).transpose(0, 1)

    @cached_property
    def leave(self) -> Tensor:
        """(N,) the end of all that continues each token: what sees it."""
        lengths, leave = zip(
            *((x.stop - x.start, x.leave) for x in sorted(self.spans)), strict=True
        )
        return to_device(torch.tensor(leave).repeat_interleave(torch.tensor(lengths)), self.device)

    @cached_property
    def mask(self) -> BlockMask:
        """The block mask: a token sees itself and what it continues."""
        leave, total = self.leave, len(self.leave)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q < leave[k])

        def strip(start: int) -> Any:
            def sees_after(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return sees(batch, head, q + start, k)

            sizes = min(STRIP, total - start), total
            return create_block_mask(sees_after, None, None, *sizes, str(self.device))

        # All queries at once would take several times N * N bytes.
        strips = [strip(start) for start in range(0, total, STRIP)]
        parts: Any = {k: torch.cat([getattr(s, k) for s in strips], 2) for k in KV_BLOCKS}
        return BlockMask.from_kv_blocks(**parts, mask_mod=sees, seq_lengths=(total, total))


def _blocks(spans: Sequence[Span]) -> Iterator[_Block]:
    """Yield a causal block for each run of segments of equal length that follow the same, then one
    to each segment from all that continues it.
    """
    for _, run in groupby(spans, key=lambda span: (span.parent, span.stop - span.start)):
        siblings = list(run)
        own = slice(siblings[0].start, siblings[-1].stop)
        yield _Block(own, own, len(siblings), causal=True)
    for start, stop, leave, _ in spans:
        if leave > stop:
            yield _Block(slice(stop, leave), slice(start, stop), 1, causal=False)


class _Attention(torch.autograd.Function):
    """Attention over the blocks of a packed row with the fused CPU kernel, (H,N,D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[_Block]
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(query.shape, dtype=wide)
        logsum = query.new_empty(query.shape[:2], dtype=wide)
        for block in blocks:
            part, own = fused_on_cpu(
                *_operands(block, query, key, value), 0.0, block.causal, scale=scale
            )
            part, own = _join(part), _join(own[..., None])[..., 0]
            if block.causal:
                out[:, block.queries], logsum[:, block.queries] = part, own
            else:
                _add(out[:, block.queries], logsum[:, block.queries], part, own)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsum)
        ctx.scale, ctx.blocks = scale, blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsum = ctx.saved_tensors
        grads = [x.new_empty(x.shape, dtype=logsum.dtype) for x in (query, key, value)]
        for block in ctx.blocks:
            inputs = (
                _split(grad[:, block.queries], block.sequences),
                *_operands(block, query, key, value),
                _split(out[:, block.queries], block.sequences),
            )
            # In bfloat16 this kernel rounds more, and takes up to three times longer.
            parts = _backward(
                *(x.to(logsum.dtype) for x in inputs),
                _split(logsum[:, block.queries, None], block.sequences)[..., 0],
                0.0,
                block.causal,
                scale=ctx.scale,
            )
            places = (block.queries, block.keys, block.keys)
            for total, place, part in zip(grads, places, parts, strict=True):
                of_heads = _join(part)
                copies = len(of_heads) // len(total)  # per key head, see `_operands`
                if copies > 1:
                    of_heads = of_heads.view(-1, copies, *of_heads.shape[1:]).sum(1)
                if block.causal:  # the first block of its tokens
                    total[:, place] = of_heads
                else:
                    total[:, place] += of_heads
        return *(total.to(query.dtype) for total in grads), None, None


def _operands(block: _Block, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return (sequences,H,length,D) each; a key head is repeated for each of its query heads."""
    copies = query.shape[0] // key.shape[0]
    keys = (_split(x[:, block.keys], block.sequences) for x in (key, value))
    repeated = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in keys)
    return [_split(query[:, block.queries], block.sequences), *repeated]


def _split(x: Tensor, count: int) -> Tensor:
    """Reshape (H,count * length,D) to (count,H,length,D)."""
    return x.view(x.shape[0], count, x.shape[1] // count, x.shape[2]).transpose(0, 1)


def _join(x: Tensor) -> Tensor:
    """Undo `_split`."""
    return x.transpose(0, 1).flatten(1, 2)


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
            query, key = query.requires_grad_(), key.requires_grad_()
            torch.autograd.backward(layout.by_flex(query, key, key, 1.0).sum())
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
