"""Which rows are being sampled from which prompts, as indices of a GPU's kernels.

Shapes: R rows, of G prompts, at most M rows per prompt; H query and K key-value heads; P tokens of
the longest prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pg.data.batch import to_device


class HeadOrder(NamedTuple):
    """The order of the query heads of rows, (R K H/K,), and of prompts, (G K, M H/K)."""

    row_heads: Tensor  # (G K, M H/K) the row's head in each place of the prompts'
    places: Tensor  # (R K H/K,) the inverse

    def by_prompt(self, x: Tensor) -> Tensor:
        """Return (G K, M H/K, W) from (R K H/K, W)."""
        return x[self.row_heads]

    def by_row(self, x: Tensor) -> Tensor:
        """Return (R K H/K, W) from (G K, M H/K, W)."""
        return x.flatten(0, 1)[self.places]


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
        count = sum(map(len, groups))
        padded = list[list[int]]()
        row_slots = [0] * count
        prompts = [0] * count
        for prompt, group in enumerate(groups):
            first = most * prompt
            for row_slot, row in enumerate(group, first):
                row_slots[row] = row_slot
                prompts[row] = prompt
            missing = most - len(group)
            padded.append([*group, *[0] * missing])  # any row
        of_prompts = torch.tensor(lengths)
        self.longest = max(lengths)
        columns = torch.arange(self.longest)
        seen = columns < of_prompts[:, None]
        self.rows = torch.arange(count, device=device)
        self.padded = to_device(torch.tensor(padded), device)
        self.row_slots = to_device(torch.tensor(row_slots), device)
        self.seen = to_device(seen, device)  # (G,P)
        # Of the prompt of each row.
        self.seen_by_rows = to_device(seen[prompts], device)  # (R,P)
        self.lengths = to_device(of_prompts[prompts], device)
        self._orders = dict[tuple[int, int], HeadOrder]()

    def order(self, key_heads: int, shared: int) -> HeadOrder:
        """Return the order of K key heads, each shared by H/K query heads."""
        shape = key_heads, shared
        if shape not in self._orders:
            self._orders[shape] = self._order(*shape)
        return self._orders[shape]

    def _order(self, key_heads: int, shared: int) -> HeadOrder:
        count = len(self.rows)
        device = self.rows.device
        heads = torch.arange(
            count * key_heads * shared,
            device=device,
        )
        heads = heads.view(count, key_heads, shared)
        row_heads = heads[self.padded]
        row_heads = row_heads.transpose(1, 2)  # (G,K,M,H/K)
        places = torch.arange(row_heads.numel(), device=device)
        places = places.view(row_heads.shape)
        places = places.transpose(1, 2)
        places = places.flatten(0, 1)[self.row_slots]
        return HeadOrder(
            row_heads.flatten(0, 1).flatten(1),
            places.flatten(),
        )
