"""Attention of completions to themselves and to a shared prompt, with exact gradients.

A packed row holds families: a prompt followed by its completions, each of which continues the
prompt and does not see its siblings. So the keys of a token are in two places, and its softmax has
two parts, over its own row and over its prompt, which are weighed by their sums (online softmax;
Milakov and Gimelshein 2018). With o and l the outputs and log-sums of exponentials:

    l = log(e^l_own + e^l_prompt),    o = e^(l_own - l) o_own + e^(l_prompt - l) o_prompt

Given o and l of both, the backward pass of either part is that of ordinary attention
(FlashAttention-2; Dao 2023, section 3.1): e^(scores - l) and D = rowsum(dO * O) are those of the
whole softmax.

Shapes: N tokens of the packed row, H query and K key-value heads, D their width.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from rlhf_pg.models.attention import fused_on_cpu
from rlhf_pg.models.gpu_attention import OnGPU

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Family(NamedTuple):
    """Lengths of a prompt and of its completions, in their order in the packed row."""

    prompt: int
    completions: list[int]


class _Block(NamedTuple):
    """Neighbouring sequences of one length, each of which attends to its share of the keys."""

    queries: slice
    keys: slice
    sequences: int
    causal: bool  # queries and keys are the same tokens; otherwise every query sees every key


class SharedPrefix:
    """A `Layout` for a packed row of families, in their order."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self._on_gpu = OnGPU(families, device)
        self._blocks = list(_blocks(families))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Fake tensors only measure memory, and the GPU kernel keeps and computes as much.
        if query.is_cuda and not isinstance(query, FakeTensor):
            return self._on_gpu.attend(query, key, value, scale)
        missing = query.shape[2] - value.shape[2]
        wide = nn.functional.pad(value, (0, missing)) if missing else value
        return self.by_blocks(query, key, wide, scale)[..., : value.shape[2]]

    def by_blocks(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value, scale, self._blocks)  # type: ignore[no-untyped-call]
        return out.transpose(0, 1)


def _blocks(families: Sequence[Family]) -> Iterator[_Block]:
    """Yield the blocks: each token queries a causal one, and in a completion its prompt's too."""
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
            part, own = _joined(part), _joined(own[..., None])[..., 0]
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
            # In bfloat16 this kernel rounds more, and takes up to three times as long.
            parts = _backward(
                *(x.to(logsum.dtype) for x in inputs),
                _split(logsum[:, block.queries, None], block.sequences)[..., 0],
                0.0,
                block.causal,
                scale=ctx.scale,
            )
            places = (block.queries, block.keys, block.keys)
            for total, place, part in zip(grads, places, parts, strict=True):
                of_heads = _joined(part)
                copies = len(of_heads) // len(total)  # of a key head: see `_operands`
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


def _joined(x: Tensor) -> Tensor:
    """Undo what `_split` did."""
    return x.transpose(0, 1).flatten(1, 2)


def _add(out: Tensor, logsum: Tensor, part: Tensor, own: Tensor) -> None:
    """Merge another part of the softmax into `out` (H,L,D) and `logsum` (H,L), in place."""
    both = torch.logaddexp(logsum, own)
    out.mul_((logsum - both).exp_()[..., None]).add_(part * (own - both).exp_()[..., None])
    logsum.copy_(both)
