"""The stores of a session's keys and values, and the attention that reads them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.models.attention import Layout
from rlhf_pg.rollout.native.cuda_graphs import rounded
from rlhf_pg.rollout.native.decode_attention import Decode, Grid, KeyValues, Prefill, Spans, bias
from rlhf_pg.rollout.native.slots import Groups, Prompt, Row


class Stores(Protocol):
    """Keys and values of the prompts and of the rows of a session, by slot."""

    fixed: bool  # whether there are few different shapes, so that steps can be replayed

    def size(self, rows: int) -> int:
        """Return the number of rows of a pass, including filler rows."""
        ...

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        """Make room for new prompts, which are among all `prompts`."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        """Lay out a pass over these prompts in order; neighbours have similar lengths."""
        ...

    def grow(self, rows: Sequence[Row], longest: int = 0) -> None:
        """Make room for one more token of every row, and for rows of `longest` tokens."""
        ...

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Any:
        """Return a dataclass of tensors that assign rows to prompts, until one enters or leaves.

        It has `positions` (R,) of the first new token and, if the rows of a pass have their own
        order, `order` (R,), the slots in that order, and `back` (R,), its inverse.
        """
        ...

    def layout(self, places: Any, last: Tensor, longest: int) -> Layout:
        """Lay out a pass over the newest token of every row, in column `last` (R,)."""
        ...

    def wide_layout(self, places: Any, columns: Tensor, grid: Grid, longest: int) -> Layout:
        """Lay out a pass over several tokens of each row, (N,) in these columns; on a CPU."""
        ...

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots of rows over others."""
        ...

    def leave(self, slot: int, last: int) -> None:
        """Remove the prompt in a slot; the last prompt takes its place."""
        ...

    def lies(self) -> tuple[int, ...]:
        """Return what changes when a store moves or changes its width."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class Padded:
    """A `Stores` of any dtype, with each prompt and row in a slot as wide as the widest."""

    def __init__(self, prompts: KeyValues, own: Spans, model: PreTrainedModel) -> None:
        self.prompts, self.own, self.model = prompts, own, model
        self.fixed = model.device.type == "cuda"

    def size(self, rows: int) -> int:
        return rounded(rows) if self.fixed else rows

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        longest = max(prompt.length for prompt in prompts)
        self.prompts.reserve(self.size(len(prompts)), longest)

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        slots = [prompt.slot for prompt in prompts if prompt.slot is not None]
        return Prefill(self.prompts, slots, [prompt.length for prompt in prompts])

    def grow(self, rows: Sequence[Row], longest: int = 0) -> None:
        longest = max([1, longest, *(row.length for row in rows)])
        self.own.reserve(self.size(len(rows)), longest)

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Groups:
        width = self.prompts.width if self.fixed else 0
        return Groups.of(prompts, rows, self.size, width, self.model)

    def layout(self, places: Groups, last: Tensor, longest: int) -> Layout:
        width = self.own.width if self.fixed else longest
        seen = torch.arange(width, device=last.device) <= last[:, None]
        own = bias(seen, self.model.dtype)
        return Decode(
            prompts=self.prompts,
            own=self.own,
            columns=_common(last),
            members=places.members,
            places=places.places,
            prompt_width=places.bias.shape[1],
            bias=torch.cat([places.bias, own], dim=1)[:, None],
        )

    def wide_layout(self, places: Groups, columns: Tensor, grid: Grid, longest: int) -> Layout:
        last = columns[grid.tokens]
        own = bias(torch.arange(longest) <= last[..., None], self.model.dtype)
        shared = places.bias[:, None].expand(-1, last.shape[1], -1)
        return Decode(
            prompts=self.prompts,
            own=self.own,
            columns=columns,
            members=places.members,
            places=places.places,
            prompt_width=places.bias.shape[1],
            bias=torch.cat([shared, own], dim=2),
            grid=grid,
        )

    def move(self, sources: list[int], targets: list[int]) -> None:
        self.own.move(sources, targets)

    def leave(self, slot: int, last: int) -> None:
        if last != slot:
            self.prompts.move([last], [slot])

    def lies(self) -> tuple[int, ...]:
        return (*self.prompts.lies(), *self.own.lies())

    def close(self) -> None:
        """Free nothing, since the memory goes with the session."""


def _common(columns: Tensor) -> Tensor | int:
    """Return the number that all columns equal, if they do; a GPU would have to be awaited."""
    if columns.device.type == "cpu" and (columns == columns[0]).all():
        return int(columns[0])
    return columns
