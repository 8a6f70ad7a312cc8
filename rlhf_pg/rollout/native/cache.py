"""The cache of earlier tokens: keys and values of attention, states of recurrent layers.

Shapes: N tokens of a pass, K key-value heads, D their width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_pg.models.recurrent import States

COLUMNS = 64  # slots have multiples of this many tokens


@dataclass(eq=False)
class KeyValues:
    """Keys and values of every layer in slots, (slots, K, width, D) each, with growing capacity.

    Args:
        spare: the most tokens of spare capacity.
        longest: the most tokens that a slot may hold.
    """

    spare: int
    longest: int

    def __post_init__(self) -> None:
        self.slots = 0
        self.width = 0
        self._layers = dict[int, tuple[Tensor, Tensor]]()
        self._limits = dict[int, int | None]()

    def reserve(self, slots: int, width: int) -> None:
        """Make room for this many slots of this many tokens, and keep their contents.

        Capacity doubles while it is small, so that gradual growth copies each number only a few
        times. When it grows in one dimension, spare capacity in the other is given back.
        """
        if slots <= self.slots and width <= self.width:
            return
        needs_width = width > self.width
        width = -(-width // COLUMNS) * COLUMNS
        if slots > self.slots:
            doubled = 2 * self.slots
            if doubled * width <= self.spare:
                slots = max(doubled, slots)
        if needs_width:
            doubled = 2 * self.width
            if slots * doubled <= self.spare:
                width = max(min(doubled, self.longest), width)
        self.slots = slots
        self.width = width
        for layer, (keys, values) in self._layers.items():  # one by one, to save memory
            limit = self._limits[layer]
            self._layers[layer] = (
                self._resize(keys, limit),
                self._resize(values, limit),
            )

    def of(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        limit: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the stores of a layer; new ones are made to fit key and value (K,N,D), with no
        more columns than its `limit`.
        """
        if layer not in self._layers:
            self._limits[layer] = limit
            self._layers[layer] = (
                self._empty(key, limit),
                self._empty(value, limit),
            )
        return self._layers[layer]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole slots over others; the indices are on the device."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets] = tensor[sources]

    def _empty(self, like: Tensor, limit: int | None) -> Tensor:
        width = self.width
        if limit is not None:
            width = min(width, limit)
        # Zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros(self.slots, len(like), width, like.shape[2])

    def _resize(self, old: Tensor, limit: int | None) -> Tensor:
        new = self._empty(old[0], limit)
        kept = old[: len(new), :, : new.shape[2]]
        new[: len(kept), :, : kept.shape[2]] = kept
        return new


class StateStore:
    """States of recurrent layers in slots."""

    def __init__(self) -> None:
        self._layers = dict[int, States]()

    def of(self, layer: int, rows: int) -> States:
        """Return the states in the first slots."""
        stored = self._layers[layer]
        return {key: states[:rows] for key, states in stored.items()}

    def write(
        self,
        layer: int,
        slots: Tensor,
        needed: int,
        states: States,
    ) -> None:
        """Write the states of a layer, (slots,...) each, where slots below `needed` are in use."""
        stored = self._layers.setdefault(layer, {})
        for key, new in states.items():
            old = stored.get(key, new[:0])
            if needed > len(old):
                capacity = max(needed, 2 * len(old))
                larger = new.new_zeros(capacity, *new.shape[1:])
                larger[: len(old)] = old
                stored[key] = larger
            stored[key][slots] = new

    def replace(self, layer: int, states: States) -> None:
        """Keep the states of all rows as they are given, without a copy."""
        self._layers[layer] = states

    def copy(
        self,
        other: "StateStore",
        sources: Tensor,
        start: int,
    ) -> None:
        """Copy slots of another store, one after another from `start`."""
        stop = start + len(sources)
        targets = torch.arange(start, stop, device=sources.device)
        for layer, states in other._layers.items():
            copied = {key: state[sources] for key, state in states.items()}
            self.write(layer, targets, stop, copied)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others."""
        for states in self._layers.values():
            for state in states.values():
                state[targets] = state[sources]
