"""Keys and values without padding, for attention by `rlhf_pg.rollout.native.flash_attention`.

Shapes: R rows of a pass, filler rows included; S query heads share a key head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from rlhf_pg.models.attention import Heads, Layout
from rlhf_pg.rollout.native.cuda_graphs import rounded
from rlhf_pg.rollout.native.decode_attention import Grid
from rlhf_pg.rollout.native.flash_attention import QUERIES, FlashDecode, FlashPrefill, FlatKeyValues
from rlhf_pg.rollout.native.slots import Prompt, Row

FEWEST = 8  # rows of a pass; fewer would take the same time


@dataclass(frozen=True)
class Places:
    """The places of rows and their prompts, constant until a row enters or leaves.

    Rows are computed in the order of their prompts. Those that share one are cut into short runs,
    at most R in all whatever the groups are, so the grid of the kernel is small.
    """

    positions: Tensor  # (R,) of the first new token, by slot
    order: Tensor  # (R,) slots
    back: Tensor  # (R,) the place of each slot in `order`
    runs: Tensor  # (R+1,) int32; run i has the places from runs[i] to runs[i + 1]
    starts: Tensor  # (R+1,) int32, of the prompt of each run
    lengths: Tensor  # (R,) int32

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        rows: Sequence[Row],
        count: int,
        most: int,
        device: torch.device,
    ) -> "Places":
        """Lay out `count` rows, where filler rows attend to the first token of the first prompt.

        Args:
            most: rows of a run.
        """
        order = sorted(range(len(rows)), key=lambda i: rows[i].prompt.slot or 0)
        runs: list[tuple[int, int, int]] = []  # rows, start and length of the prompt
        for slot, group in groupby(rows[i].prompt.slot or 0 for i in order):
            runs += _cut(len(list(group)), most, prompts[slot].start, prompts[slot].length)
        runs += _cut(count - len(rows), most, prompts[0].start, 1)
        runs += [(0, 0, 0)] * (count - len(runs))
        order += range(len(rows), count)
        back = sorted(range(count), key=order.__getitem__)
        positions = [row.prompt.length for row in rows] + [0] * (count - len(rows))
        counts, starts, lengths = zip(*runs, strict=True)
        # One copy to the device.
        numbers = [*positions, *order, *back, 0, *accumulate(counts), *starts, 0, *lengths]
        there = torch.tensor(numbers).to(device)
        sizes = [count, count, count, count + 1, count + 1, count]
        a, b, c, *rest = torch.split(there, sizes)
        # Each gets its own memory, as their copies do; otherwise the step is compiled again.
        return cls(a.clone(), b.clone(), c.clone(), *(x.int() for x in rest))


def _cut(rows: int, most: int, start: int, length: int) -> list[tuple[int, int, int]]:
    return [(min(most, rows - i), start, length) for i in range(0, rows, most)]


class Unpadded:
    """A `Stores` with rows in slots of one size, and prompts wherever there is a gap.

    Args:
        max_tokens: the most tokens of a row.
        layers: of the model.
    """

    fixed = True  # shapes depend on the number of rows alone

    def __init__(self, max_tokens: int, layers: Mapping[int, Heads], device: torch.device) -> None:
        self.max_tokens, self.device = max_tokens, device
        self.prompts, self.own = FlatKeyValues(layers, device), FlatKeyValues(layers, device)
        self.shares = sorted({heads.queries // heads.key_values for heads in layers.values()})

    def begin(self, cache_tokens: int) -> None:
        """Begin a session; sizes of earlier ones are kept as long as there is room for them."""
        if self.prompts.tokens + self.own.tokens > cache_tokens:
            self.prompts.tokens = self.own.tokens = 0

    def size(self, rows: int) -> int:
        return max(rounded(rows), FEWEST)

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        new = {id(prompt) for prompt in fresh}
        taken = sorted((p.start, p.start + p.length) for p in prompts if id(p) not in new)
        for prompt in fresh:
            prompt.start = _gap(taken, prompt.length)
            taken = sorted([*taken, (prompt.start, prompt.start + prompt.length)])
        self.prompts.reserve(_coarse(taken[-1][1]))

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        lengths = [prompt.length for prompt in prompts]
        index = torch.cat([torch.arange(p.start, p.start + p.length) for p in prompts])
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return FlashPrefill(
            store=self.prompts,
            index=index.to(self.device),
            bounds=bounds.to(self.device),
            longest=max(lengths),
        )

    def grow(self, rows: Sequence[Row], longest: int = 0) -> None:
        self.own.reserve(self.size(len(rows)) * self.max_tokens)

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Places:
        most = max(1, QUERIES // self.shares[-1])
        return Places.of(prompts, rows, self.size(len(rows)), most, self.device)

    def layout(self, places: Places, last: Tensor, longest: int) -> Layout:
        slots = torch.arange(len(last) + 1, device=last.device)
        starts = torch.where(slots < len(last), nn.functional.pad(places.order, (0, 1)), 0)
        starts = starts * self.max_tokens
        last = last[places.order]
        return FlashDecode(
            prompts=self.prompts,
            own=self.own,
            index=starts[:-1] + last,
            own_starts=starts.int(),
            own_lengths=(last + 1).int(),
            starts=places.starts,
            lengths=places.lengths,
            bounds={s: ((slots * s).int(), places.runs * s) for s in self.shares},
        )

    def wide_layout(self, places: Places, columns: Tensor, grid: Grid, longest: int) -> Layout:
        raise NotImplementedError("drafts are for CPUs")

    def move(self, sources: list[int], targets: list[int]) -> None:
        source, target = torch.tensor([sources, targets], device=self.device)
        for store in self.own.tensors():
            slots = store.view(-1, self.max_tokens, *store.shape[1:])
            slots[target] = slots[source]

    def leave(self, slot: int, last: int) -> None:
        """Leave the prompt's tokens as a gap."""

    def lies(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for x in (*self.prompts.tensors(), *self.own.tensors()))

    def close(self) -> None:
        self.prompts.layers.clear()
        self.own.layers.clear()


def _gap(taken: Sequence[tuple[int, int]], length: int) -> int:
    """Return the start of the first gap with room for `length` tokens."""
    end = 0
    for start, behind in taken:
        if start - end >= length:
            break
        end = behind
    return end


def _coarse(tokens: int) -> int:
    """Round up to one of few sizes, at most a quarter more, so sessions tend to need the same."""
    step = 1 << max(tokens.bit_length() - 3, 10)
    return -(-tokens // step) * step
