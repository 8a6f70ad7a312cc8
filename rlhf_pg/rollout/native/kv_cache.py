"""Where the keys and values of a session lie, and the attention that reads them there."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.models.attention import Layout
from rlhf_pg.rollout.native.cuda_graphs import rounded
from rlhf_pg.rollout.native.decode_attention import Decode, KeyValues, Prefill, bias
from rlhf_pg.rollout.native.slots import Groups, Prompt, Row


class Stores(Protocol):
    """Keys and values of the prompts and of the rows of a session, by slot."""

    fixed: bool  # whether shapes are of few sizes, so that a step can be recorded and replayed

    def size(self, rows: int) -> int:
        """Rows of a pass, with those that only fill it up."""
        ...

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        """Make room for new prompts, which are among all `prompts`."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        """For a pass over these prompts, one after another; neighbours are of like lengths."""
        ...

    def grow(self, rows: Sequence[Row]) -> None:
        """Make room for one more token of every row."""
        ...

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Any:
        """A dataclass of tensors that say which row has which prompt, until one enters or leaves.

        Among them are `positions` (R,) of the first new token and, where the rows of a pass are in
        an order of their own, `order` (R,), the slots in that order, and `back` (R,), its inverse.
        """
        ...

    def layout(self, places: Any, last: Tensor, longest: int) -> Layout:
        """For a pass over the newest token of every row, whose column is `last` (R,)."""
        ...

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots of rows over others."""
        ...

    def leave(self, slot: int, last: int) -> None:
        """The prompt in this slot has left, and the last one is given its place."""
        ...

    def lies(self) -> tuple[int, ...]:
        """What changes when something lies elsewhere than before, or has another width."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Padded:
    """See `Stores`: prompts and rows of any dtype, each in a slot as wide as the widest."""

    def __init__(self, prompts: KeyValues, own: KeyValues, model: PreTrainedModel) -> None:
        self.prompts, self.own, self.model = prompts, own, model
        self.fixed = model.device.type == "cuda"

    def size(self, rows: int) -> int:
        """See `Stores`."""
        return rounded(rows) if self.fixed else rows

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        """See `Stores`."""
        longest = max(prompt.length for prompt in prompts)
        self.prompts.reserve(self.size(len(prompts)), longest)

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        """See `Stores`."""
        slots = [prompt.slot for prompt in prompts if prompt.slot is not None]
        return Prefill(self.prompts, slots, [prompt.length for prompt in prompts])

    def grow(self, rows: Sequence[Row]) -> None:
        """See `Stores`."""
        longest = max(row.length for row in rows)
        self.own.reserve(self.size(len(rows)), max(longest, 1))

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Groups:
        """See `Stores`."""
        width = self.prompts.width if self.fixed else 0
        return Groups.of(prompts, rows, self.size, width, self.model)

    def layout(self, places: Groups, last: Tensor, longest: int) -> Layout:
        """See `Stores`."""
        width = self.own.width if self.fixed else longest
        return Decode(
            prompts=self.prompts,
            own=self.own,
            columns=_common(last),
            members=places.members,
            places=places.places,
            prompt_bias=places.bias,
            own_bias=bias(
                torch.arange(width, device=last.device) <= last[:, None], self.model.dtype
            ),
        )

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `Stores`."""
        self.own.move(sources, targets)

    def leave(self, slot: int, last: int) -> None:
        """See `Stores`."""
        if last != slot:
            self.prompts.move([last], [slot])

    def lies(self) -> tuple[int, ...]:
        """See `Stores`."""
        return (*self.prompts.lies(), *self.own.lies())

    def close(self) -> None:
        """See `Stores`: it goes with its session."""


def _common(columns: Tensor) -> Tensor | int:
    """The one number of which all are, on a CPU; a GPU would have to be waited for."""
    if columns.device.type == "cpu" and (columns == columns[0]).all():
        return int(columns[0])
    return columns
