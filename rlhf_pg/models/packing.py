"""Layouts of a batch for a model, packed or padded, and the attention of packed rows.

A packed row has no padding. It holds families: a prompt followed by its completions, each of which
continues the prompt and does not see its siblings. So the keys of a token are in two places, and
its softmax has two parts, over its own row and over its prompt, which are weighted by their sums
(online softmax; Milakov and Gimelshein 2018). With outputs o and log-sums of exponentials l:

    l = log(e^l_own + e^l_prompt),    o = e^(l_own - l) o_own + e^(l_prompt - l) o_prompt

With the combined o and l, the backward pass of either part is the ordinary one (FlashAttention-2;
Dao 2023, section 3.1): e^(scores - l) and D = rowsum(dO * O) belong to the whole softmax. A GPU
uses one FlexAttention kernel, or SDPA with a mask where that fails.

Shapes: B rows, P prompt width, T completion width; N computed tokens, H query and K key-value
heads, D their width.
"""

import logging
import math
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

from rlhf_pg.data.batch import Batch, to_device
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
    states: Tensor  # (B,T+1) indices into the N tokens: the state before each token, and the last
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
    """Lay prompts and completions side by side, (B,P+T)."""
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
    inputs = {
        "input_ids": torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        "attention_mask": mask,
        # Positions count real tokens, not columns, which matters for absolute positions.
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    rows, width = mask.shape
    columns = torch.arange(batch.prompt_ids.shape[1] - 1, width, device=mask.device)
    states = torch.arange(rows, device=mask.device)[:, None] * width + columns
    return DecoderInput(inputs, states, (mask * batch.action_mask.any(1, keepdim=True)).flatten())


def lay_out_packed(batch: Batch) -> DecoderInput:
    """Lay all real tokens one after another, (1,N), in the families of `SharedPrefix`.

    Indices are computed on the host and moved to the device in one piece.
    """
    rows = batch.with_counts().host_rows or ()
    device, width = batch.completion_ids.device, batch.prompt_ids.shape[1]
    prompt, completion = torch.tensor([(row.prompt, row.completion) for row in rows]).T
    family = torch.tensor([row.family for row in rows])
    first = torch.ones(len(rows), dtype=torch.bool)
    first[1:] = family[1:] != family[:-1]
    run = first.cumsum(0) - 1  # number of the row's family
    columns = torch.arange(batch.width)
    there = (columns >= (width - prompt)[:, None]) & (columns < (width + completion)[:, None])
    kept = there & (first[:, None] | (columns >= width))
    # Padding gets the index of the last real token before it; any state would do.
    places = (kept.flatten().cumsum(0) - 1).view_as(kept)
    prompt_end = places[first, width - 1][run]
    states = torch.cat([prompt_end[:, None], places[:, width:]], dim=1)
    positions = (there.cumsum(dim=1) - 1)[kept]
    sources = kept.flatten().nonzero().squeeze(1)
    acts = torch.tensor([int(row.actions > 0) for row in rows])
    shared = torch.zeros_like(run).scatter_add(0, run, acts)[run]
    shares = torch.where(columns < width, shared[:, None], acts[:, None])[kept]
    count = len(sources)
    together = to_device(torch.cat([sources, positions, shares, states.flatten()]), device)
    sources, positions, shares, flat = together.tensor_split([count, 2 * count, 3 * count])
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).flatten()[sources]
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row.family)]
    families = [Family(run[0].prompt, [row.completion for row in run]) for run in runs]
    inputs = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids[None]),  # without it some models infer padding
        "position_ids": positions[None],
        "layout": SharedPrefix(families, device),
    }
    return DecoderInput(inputs, flat.view_as(states), shares)


class Family(NamedTuple):
    """Lengths of a prompt and its completions, in their order in the packed row."""

    prompt: int
    completions: list[int]


class _Block(NamedTuple):
    """Neighbouring sequences of equal length, each attending to its share of the keys."""

    queries: slice
    keys: slice
    sequences: int
    causal: bool  # queries and keys are the same tokens; otherwise every query sees every key


class SharedPrefix:
    """A `Layout` for a packed row of families, in their order."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self.families, self.device = families, device
        self._blocks = list(_blocks(families))

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
        """Attend family by family, with a mask that hides siblings."""
        parts, start = list[Tensor](), 0
        for prompt, completions in self.families:
            lengths = torch.tensor([prompt, *completions])
            row = to_device(torch.arange(len(lengths)).repeat_interleave(lengths), query.device)
            own = slice(start, start + len(row))
            q, k, v = (x[None, :, own] for x in (query, key, value))
            sees = ((row[:, None] == row) | (row == 0)).tril()
            shares = query.shape[0] != key.shape[0]
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=sees, scale=scale, enable_gqa=shares
            )
            parts.append(out[0])
            start += len(row)
        return torch.cat(parts, dim=1).transpose(0, 1)

    @cached_property
    def mask(self) -> BlockMask:
        """The block mask: a token sees itself and earlier tokens of its own row or its prompt."""
        lengths = [[prompt, *completions] for prompt, completions in self.families]
        families = [i for i, rows in enumerate(lengths) for _ in range(sum(rows))]
        places = [j for rows in lengths for j, length in enumerate(rows) for _ in range(length)]
        family, row = to_device(torch.tensor([families, places]), self.device).unbind()

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (family[q] == family[k]) & ((row[k] == row[q]) | (row[k] == 0))

        def strip(start: int) -> Any:
            def sees_after(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return sees(batch, head, q + start, k)

            sizes = min(STRIP, total - start), total
            return create_block_mask(sees_after, None, None, *sizes, str(self.device))

        # All queries at once would take several times N * N bytes.
        total = len(families)
        strips = [strip(start) for start in range(0, total, STRIP)]
        parts: Any = {k: torch.cat([getattr(s, k) for s in strips], 2) for k in KV_BLOCKS}
        return BlockMask.from_kv_blocks(**parts, mask_mod=sees, seq_lengths=(total, total))


def _blocks(families: Sequence[Family]) -> Iterator[_Block]:
    """Yield the blocks: a causal one for each sequence, and one from completions to prompts."""
    start = 0
    for prompt, completions in families:
        keys = slice(start, start + prompt)
        yield _Block(keys, keys, 1, causal=True)
        start = first = keys.stop
        for length, run in groupby(completions):
            count = len(list(run))
            own = slice(start, start + count * length)
            if length:
                yield _Block(own, own, count, causal=True)
            start = own.stop
        if start > first:
            yield _Block(slice(first, start), keys, 1, causal=False)


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
    """Return the operands of the kernel, (sequences,H,length,D) each.

    A key head is repeated for each of its query heads.
    """
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
    layout = SharedPrefix([Family(150, [10])], device)
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
