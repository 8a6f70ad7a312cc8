"""Attention of packed families on a GPU, as described in `rlhf_pg.models.shared_prefix`.

It is one FlexAttention kernel, compiled by `torch.compile`; where that fails, SDPA row by row takes
its place.

Shapes: N tokens of the packed row, H query and K key-value heads, D their width.
"""

import logging
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rlhf_pg.data.batch import to_device

Families: TypeAlias = Sequence[tuple[int, list[int]]]  # lengths of each prompt and its completions

# For all kinds of heads, passes and masks. Beyond its limit torch computes every score instead.
RECOMPILATIONS = 64
STRIP = 1024  # queries whose block mask is made at a time
KV_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NARROWEST = 16  # smallest head width of the kernel; zero padding changes no score

logger = logging.getLogger(__name__)


class OnGPU:
    """Attention of the completions in a packed row to themselves and to their prompts."""

    def __init__(self, families: Families, device: torch.device) -> None:
        self.families, self.device = families, device

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        width = max(-(-query.shape[2] // 8) * 8, NARROWEST)  # every kernel here takes this
        wide = [
            x if x.shape[2] >= width else nn.functional.pad(x, (0, width - x.shape[2]))
            for x in (query, key, value)
        ]
        heads = (query.shape[0], key.shape[0], width)
        by = self.by_flex if flex_compiles(query.dtype, heads, query.device) else self.by_rows
        return by(wide[0], wide[1], wide[2], scale)[..., : value.shape[2]]

    def by_flex(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with one fused kernel that skips unseen keys (FlexAttention; Dong et al. 2024)."""
        attend: Any = _compiled() if query.is_cuda else flex_attention
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

    def by_rows(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend row by row, with a copy of the prompt's keys before each completion's own."""
        parts, start = list[Tensor](), 0
        for prompt, completions in self.families:
            shared = slice(start, start + prompt)
            for i, length in enumerate([prompt, *completions]):
                own = slice(start, start + length)
                keys, values = (
                    torch.cat([x[:, shared], x[:, own]], 1) if i else x[:, own]
                    for x in (key, value)
                )
                mask = torch.ones(length, keys.shape[1], dtype=torch.bool, device=query.device)
                out = nn.functional.scaled_dot_product_attention(
                    query[None, :, own],
                    keys[None],
                    values[None],
                    attn_mask=mask.tril(keys.shape[1] - length),
                    scale=scale,
                    enable_gqa=query.shape[0] != key.shape[0],
                )
                parts.append(out[0])
                start += length
        return torch.cat(parts, dim=1).transpose(0, 1)

    @cached_property
    def mask(self) -> BlockMask:
        """The block mask: a token sees itself and what is earlier in its own row or its prompt."""
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


@cache
def flex_compiles(dtype: torch.dtype, heads: tuple[int, int, int], device: torch.device) -> bool:
    """Return whether FlexAttention compiles for query heads, key heads and width; log why not."""
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
        reason = str(error).partition("\n")[0]
        logger.warning("without FlexAttention; attention uses SDPA, which is slower: %s", reason)
        return False
    return True


@cache
def _compiled() -> Any:
    """Compile FlexAttention on first use: importing the compiler takes a second."""
    return torch.compile(flex_attention, dynamic=True)
