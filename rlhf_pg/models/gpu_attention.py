"""Attention of packed families on a GPU, as described in `rlhf_pg.models.shared_prefix`.

It is one FlexAttention kernel, compiled by `torch.compile`; where that fails, ready-made kernels
take its place.

Shapes: N tokens of the packed row, H query and K key-value heads, D their width.
"""

import logging
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rlhf_pg.data.records import to_device

Families: TypeAlias = Sequence[tuple[int, list[int]]]  # lengths of each prompt and its completions

BLOCK = 128  # tokens that the kernel skips or computes together
# For all kinds of heads, passes and masks. Beyond its limit torch computes every score instead.
RECOMPILATIONS = 64
NARROWEST = 16  # smallest head width of the kernel; zero padding changes no score
_varlen = torch.ops.aten._flash_attention_forward

logger = logging.getLogger(__name__)


class OnGPU:
    """Attention of the completions in a packed row to themselves and to their prompts."""

    def __init__(self, families: Families, device: torch.device) -> None:
        self.families, self.device = families, device

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        width = max(-(-query.shape[2] // 8) * 8, NARROWEST)  # every kernel here takes this
        wide = [_widened(x, width) for x in (query, key, value)]
        heads = (query.shape[0], key.shape[0], width)
        by = self.by_flex if flex_compiles(query.dtype, heads, query.device) else self.by_rows
        return by(wide[0], wide[1], wide[2], scale)[..., : value.shape[2]]

    def by_flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with one fused kernel that skips unseen keys (FlexAttention; Dong et al. 2024)."""
        attend: Any = _compiled() if query.is_cuda else flex_attention
        # For fewer than 128 tokens inductor would choose a kernel that cannot use these blocks.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            out: Tensor = attend(
                query[None],
                key[None],
                value[None],
                block_mask=self.mask,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
                kernel_options=options,
            )
        return out[0].transpose(0, 1)

    def by_rows(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend row by row, with a copy of the prompt's keys before each completion's own.

        That is one call of the variable-length kernel if it supports the dtype, else one call a
        row.
        """
        rows = self._rows
        keys, values = key[:, rows.keys], value[:, rows.keys]
        if _takes_varlen(query):
            ends = (rows.query_ends, rows.key_ends, max(rows.queries), max(rows.seen))
            operands = (x.transpose(0, 1) for x in (query, keys, values))
            out: Tensor = _varlen(*operands, *ends, 0.0, True, False, scale=scale)[0]
            return out
        split = torch.split
        parts = zip(
            split(query, rows.queries, 1),
            split(keys, rows.seen, 1),
            split(values, rows.seen, 1),
            strict=True,
        )
        return torch.cat([_row(q, k, v, scale) for q, k, v in parts], dim=1).transpose(0, 1)

    @cached_property
    def _rows(self) -> "_Rows":
        return _Rows.of(self.families, self.device)

    @cached_property
    def mask(self) -> BlockMask:
        """The block mask: a token sees itself and what is earlier in its own row or its prompt."""
        family, row = self._places()
        total = len(family)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (family[q] == family[k]) & ((row[k] == row[q]) | (row[k] == 0))

        # A few blocks of queries at a time: all at once would take several times N * N bytes.
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
        """Return the family of every token and its row there, 0 for the prompt; (N,) each."""
        lengths = [[prompt, *completions] for prompt, completions in self.families]
        family = [i for i, rows in enumerate(lengths) for _ in range(sum(rows))]
        row = [j for rows in lengths for j, length in enumerate(rows) for _ in range(length)]
        both = to_device(torch.tensor([family, row]), self.device)
        return both[0], both[1]


class _Rows(NamedTuple):
    """Prompts and completions as separate sequences, with the keys that each of them sees."""

    queries: list[int]  # tokens of each
    seen: list[int]  # keys of each: those of its prompt, and its own
    keys: Tensor  # (sum of seen,) places of those keys in the packed row
    query_ends: Tensor  # (sequences + 1,) int32, boundaries of the sequences
    key_ends: Tensor

    @classmethod
    def of(cls, families: Families, device: torch.device) -> "_Rows":
        queries, keys, start = list[int](), list[Tensor](), 0
        for prompt, completions in families:
            shared = torch.arange(start, start + prompt)
            for length, others in ((prompt, shared[:0]), *((c, shared) for c in completions if c)):
                queries.append(length)
                keys.append(torch.cat([others, torch.arange(start, start + length)]))
                start += length
        seen = [len(own) for own in keys]
        ends = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, seen))
        places = (to_device(x, device) for x in (torch.cat(keys), *(end.int() for end in ends)))
        return cls(queries, seen, *places)


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with one row, (H,L,D); the last L keys are those of the queries."""
    length, seen = query.shape[1], key.shape[1]
    mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
    return nn.functional.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]


def _takes_varlen(query: Tensor) -> bool:
    """Return whether the variable-length kernel supports these heads on this GPU."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[2] <= 256


@cache
def flex_compiles(dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device) -> bool:
    """Try to compile FlexAttention for such heads, and return whether it works; log once why not.

    Args:
        heads: query heads, key-value heads, and their width.
    """
    query, key = (torch.ones(h, 160, heads[2], dtype=dtype, device=device) for h in heads[:2])
    layout = OnGPU([(150, [10])], device)
    try:
        if dtype == torch.float64:
            raise TypeError("it has no float64")
        # Separate hooks: the first pass may run under gradient checkpointing, whose hooks would
        # mistake the tensors saved here for the layer's.
        own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), own:
            query, key = query.requires_grad_(), key.requires_grad_()
            torch.autograd.backward(layout.by_flex(query, key, key, 1.0).sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        how = "the variable-length kernel" if _takes_varlen(query) else "SDPA"
        reason = str(error).partition("\n")[0]
        logger.warning("without FlexAttention; attention uses %s, which is slower: %s", how, reason)
        return False
    return True


@cache
def _compiled() -> Any:
    """Compile FlexAttention on first use: importing the compiler takes a second."""
    return torch.compile(flex_attention, dynamic=True)


def _widened(x: Tensor, width: int) -> Tensor:
    return nn.functional.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x


def _seen_blocks(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each pair of blocks in (n,N) whether any query sees a key, and whether all do.

    The missing part of a last block sees nothing.
    """
    missing = [-length % BLOCK for length in seen.shape]
    seen = nn.functional.pad(seen, (0, missing[1], 0, missing[0]))
    queries, keys = (length // BLOCK for length in seen.shape)
    pairs = seen.view(queries, BLOCK, keys, BLOCK)
    return pairs.any(3).any(1), pairs.all(3).all(1)


def _ordered(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and the indices of all, those first."""
    order = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), order.int()
