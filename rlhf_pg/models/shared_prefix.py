"""Attention of completions to themselves and to a prompt that they share, with exact gradients.

A packed row holds families: a prompt and after it its completions, each of which continues the
prompt and does not see its siblings. So the keys of a token are in two places, and its softmax has
two parts, over its own row and over its prompt, which are weighed by what each adds up to (online
softmax; Milakov and Gimelshein 2018). With o and l the outputs and log-sums of exponentials:

    l = log(e^l_own + e^l_prompt),    o = e^(l_own - l) o_own + e^(l_prompt - l) o_prompt

Given o and l of both, the backward pass of either part is that of ordinary attention
(FlashAttention-2; Dao 2023, section 3.1): e^(scores - l) and D = rowsum(dO * O) are those of the
whole softmax.

Shapes: N tokens of the packed row, H query and K key-value heads, D their width.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rlhf_pg.models.attention import fused_on_cpu

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
BLOCK = 128  # tokens that the fused kernel on GPUs skips or computes together
NARROWEST = 16  # numbers of a head that it takes; zeros behind narrower ones change no score

logger = logging.getLogger(__name__)


class Family(NamedTuple):
    """Lengths of a prompt and of its completions, as they lie one after another."""

    prompt: int
    completions: list[int]


class _Block(NamedTuple):
    """Neighbouring sequences of one length, each of which attends to one of the keys."""

    queries: slice
    keys: slice
    sequences: int
    causal: bool  # queries and keys are the same tokens; otherwise every query sees every key


class SharedPrefix:
    """The `Layout` of a packed row of families.

    Args:
        families: in the order of the row.
        device: of the row.
    """

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self.families, self.device = families, device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout`."""
        on_gpu = self.device.type == "cuda"
        width = max(query.shape[2], NARROWEST if on_gpu else 0)
        missing = [width - x.shape[2] for x in (query, key, value)]
        wide = [
            nn.functional.pad(x, (0, more)) if more else x
            for x, more in zip((query, key, value), missing, strict=True)
        ]
        attend = self._on_gpu if on_gpu else self._by_blocks
        return attend(*wide, scale)[..., : value.shape[2]]

    def _on_gpu(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if isinstance(query, FakeTensor):  # to be measured: it keeps and computes as much
            return self._by_blocks(query, key, value, scale)
        heads = (query.shape[0], key.shape[0], query.shape[2])
        flex = flex_compiles(query.dtype, heads, query.device)
        return (self._by_kernel if flex else self._by_rows)(query, key, value, scale)

    def _by_blocks(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value, scale, self._blocks)  # type: ignore[no-untyped-call]
        return out.transpose(0, 1)

    @cached_property
    def _blocks(self) -> list[_Block]:
        return list(_blocks(self.families))

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One fused kernel that skips what no query sees (FlexAttention; Dong et al. 2024)."""
        attend: Any = _compiled() if query.is_cuda else flex_attention
        # For fewer than 128 tokens inductor would choose a kernel that cannot have these blocks.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        out: Tensor = attend(
            query[None],
            key[None],
            value[None],
            block_mask=self._mask,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options=options,
        )
        return out[0].transpose(0, 1)

    def _by_rows(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Every completion on a copy of its prompt's keys and its own: by the fused kernel for
        sequences of any length where it has the dtype, else by one call a row.
        """
        rows = self._rows
        keys, values = key[:, rows.keys], value[:, rows.keys]
        if _takes_varlen(query):
            ends = (rows.query_ends, rows.key_ends, max(rows.queries), max(rows.seen))
            operands = (x.transpose(0, 1) for x in (query, keys, values))
            out: Tensor = _varlen(*operands, *ends, 0.0, True, False, scale=scale)[0]
            return out
        sizes = (rows.queries, rows.seen, rows.seen)
        parts = zip(
            *(x.split(size, 1) for x, size in zip((query, keys, values), sizes, strict=True)),
            strict=True,
        )
        return torch.cat([_row(*part, scale) for part in parts], dim=1).transpose(0, 1)

    @cached_property
    def _rows(self) -> "_Rows":
        return _Rows.of(self.families, self.device)

    @cached_property
    def _mask(self) -> BlockMask:
        """Token q sees token k if k is not later, in the same family, and in q's row or prompt."""
        family, row = self._places()
        total = len(family)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (family[q] == family[k]) & ((row[k] == row[q]) | (row[k] == 0))

        # A few blocks of queries at a time: all at once takes several times N * N bytes.
        tokens, none = torch.arange(total, device=self.device), torch.zeros(())
        parts = [
            _seen_blocks(sees(none, none, queries[:, None], tokens))
            for queries in torch.split(tokens, 8 * BLOCK)
        ]
        some, every = (torch.cat(part)[None, None] for part in zip(*parts, strict=True))
        return BlockMask.from_kv_blocks(
            *_ordered(some & ~every),
            *_ordered(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(total, total),
        )

    def _places(self) -> tuple[Tensor, Tensor]:
        """The family of every token, and its row there: 0 for the prompt; (N,) each."""
        lengths = [[prompt, *completions] for prompt, completions in self.families]
        family = [i for i, rows in enumerate(lengths) for _ in range(sum(rows))]
        row = [j for rows in lengths for j, length in enumerate(rows) for _ in range(length)]
        return torch.tensor(family, device=self.device), torch.tensor(row, device=self.device)


class _Rows(NamedTuple):
    """Prompts and completions as sequences of their own, with the keys that each of them sees."""

    queries: list[int]  # tokens of each
    seen: list[int]  # keys of each: those of its prompt, and its own
    keys: Tensor  # (sum of seen,) places of those keys in the packed row
    query_ends: Tensor  # (sequences + 1,) int32, where each begins and ends
    key_ends: Tensor

    @classmethod
    def of(cls, families: Sequence[Family], device: torch.device) -> "_Rows":
        queries, keys, start = list[int](), list[Tensor](), 0
        for prompt, completions in families:
            shared = torch.arange(start, start + prompt)
            for length, others in ((prompt, shared[:0]), *((c, shared) for c in completions if c)):
                queries.append(length)
                keys.append(torch.cat([others, torch.arange(start, start + length)]))
                start += length
        seen = [len(own) for own in keys]
        ends = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, seen))
        return cls(queries, seen, torch.cat(keys).to(device), *(e.int().to(device) for e in ends))


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """(H,L,D), the last of the keys being the queries' own."""
    length, seen = query.shape[1], key.shape[1]
    mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
    one = (x[None] for x in (query, key, value))
    options = {"scale": scale, "enable_gqa": query.shape[0] != key.shape[0]}
    return nn.functional.scaled_dot_product_attention(*one, attn_mask=mask, **options)[0]


def _takes_varlen(query: Tensor) -> bool:
    """Whether the fused kernel for sequences of any length takes such heads."""
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[2] <= 256


@cache
def flex_compiles(dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device) -> bool:
    """Whether FlexAttention can be compiled for heads of this kind, which is tried; if not, the log
    says why, once.

    Args:
        heads: query heads, key-value heads, and their width.
    """
    query, key = (torch.ones(h, 160, heads[2], dtype=dtype, device=device) for h in heads[:2])
    layout = SharedPrefix([Family(150, [10])], device)
    try:
        if dtype == torch.float64:
            raise TypeError("it has no float64")
        with torch.enable_grad():
            parts = (query.requires_grad_(), key.requires_grad_(), key)
            layout._by_kernel(*parts, 1.0).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        how = "the fused kernel for sequences of any length" if _takes_varlen(query) else "SDPA"
        reason = str(error).partition("\n")[0]
        logger.warning("without FlexAttention, by %s, which is slower: %s", how, reason)
        return False
    return True


@cache
def _compiled() -> Any:
    """When it is first needed: what compiles takes a second to import."""
    return torch.compile(flex_attention, dynamic=True)


def _seen_blocks(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair of blocks in (n,N), whether any query sees any key, and every query every key;
    what is missing of a last block sees nothing.
    """
    missing = [-length % BLOCK for length in seen.shape]
    seen = nn.functional.pad(seen, (0, missing[1], 0, missing[0]))
    queries, keys = (length // BLOCK for length in seen.shape)
    pairs = seen.view(queries, BLOCK, keys, BLOCK)
    return pairs.any(3).any(1), pairs.all(3).all(1)


def _ordered(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks belong to each query block, and their numbers in front of the others."""
    order = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), order.int()


def _blocks(families: Sequence[Family]) -> Iterator[_Block]:
    """Every token is a query of one causal block, and in a completion of one other, its prompt."""
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
    """The blocks of a packed row, by the fused kernel for CPUs: (H,N,D)."""

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
            parts = _backward(
                _split(grad[:, block.queries], block.sequences),
                *_operands(block, query, key, value),
                _split(out[:, block.queries], block.sequences),
                _split(logsum[:, block.queries, None], block.sequences)[..., 0],
                0.0,
                block.causal,
                scale=ctx.scale,
            )
            places = (block.queries, block.keys, block.keys)
            for total, place, part in zip(grads, places, parts, strict=True):
                of_heads = _joined(part).to(total.dtype)
                copies = len(of_heads) // len(total)  # of a key head: see `_operands`
                if copies > 1:
                    of_heads = of_heads.view(-1, copies, *of_heads.shape[1:]).sum(1)
                if block.causal:  # the first block of its tokens
                    total[:, place] = of_heads
                else:
                    total[:, place] += of_heads
        return *(total.to(query.dtype) for total in grads), None, None


def _operands(block: _Block, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """What the kernel takes, (sequences,H,length,D) each: a key head once for every query head."""
    copies = query.shape[0] // key.shape[0]
    keys = (_split(x[:, block.keys], block.sequences) for x in (key, value))
    repeated = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in keys)
    return [_split(query[:, block.queries], block.sequences), *repeated]


def _split(x: Tensor, count: int) -> Tensor:
    """(H,count * length,D) to (count,H,length,D)."""
    return x.view(x.shape[0], count, x.shape[1] // count, x.shape[2]).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    """The inverse of `_split`."""
    return x.transpose(0, 1).flatten(1, 2)


def _add(out: Tensor, logsum: Tensor, part: Tensor, own: Tensor) -> None:
    """Weigh another part of the softmax in, in place: (H,L,D) and (H,L) each."""
    both = torch.logaddexp(logsum, own)
    out.mul_((logsum - both).exp_()[..., None]).add_(part * (own - both).exp_()[..., None])
    logsum.copy_(both)
