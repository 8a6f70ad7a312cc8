"""CUDA graphs: the kernels of a decoding step, recorded once per shape and launched as one."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.rollout.attention import Decode

logger = logging.getLogger(__name__)

WORTH_RECORDING = 3  # times that a shape was seen

Forward = Callable[[Tensor, Tensor, Decode], Tensor]


def rounded(size: int) -> int:
    """The next of few sizes: powers of two, from 32 on multiples of 32; 0 is 0."""
    return -(-size // 32) * 32 if size > 32 else 2 ** (size - 1).bit_length() if size else 0


class Graphs:
    """Runs `forward(ids, positions, layout)` by replaying it.

    What it reads is copied to where it was when it was recorded; the weights have to stay in their
    place, and when the stores of keys and values have grown everything is recorded anew.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.pool = torch.cuda.graph_pool_handle()
        self.stores: list[int] = []
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.recorded: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self.works = True

    def __call__(self, ids: Tensor, positions: Tensor, layout: Decode) -> Tensor:
        """The logits (R,V), valid until the next call."""
        inputs = [ids, positions, *_tensors(layout).values()]
        stores = [store.grown for store in (layout.prompts, layout.own)]
        if stores != self.stores:  # they lie elsewhere now
            self.stores = stores
            self.seen.clear()
            self.recorded.clear()
            self.pool = torch.cuda.graph_pool_handle()  # one without graphs is not taken up again
        key = tuple(tensor.shape for tensor in inputs)
        self.seen[key] += 1
        if not self.works or self.seen[key] < WORTH_RECORDING:
            return self.forward(ids, positions, layout)
        if key not in self.recorded:
            try:
                self.recorded[key] = self._record(ids, positions, layout)
            except RuntimeError as error:
                logger.warning("decoding without CUDA graphs, which is slower: %s", error)
                self.works = False
                return self.forward(ids, positions, layout)
        graph, places, logits = self.recorded[key]
        for place, tensor in zip(places, inputs, strict=True):
            place.copy_(tensor)
        graph.replay()
        return logits

    def _record(
        self, ids: Tensor, positions: Tensor, layout: Decode
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        ids, positions = ids.clone(), positions.clone()
        own: dict[str, Any] = {name: x.clone() for name, x in _tensors(layout).items()}
        layout = dataclasses.replace(layout, **own)
        # Once beside it, as torch asks: libraries choose their kernels at the first call.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(ids, positions, layout)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self.forward(ids, positions, layout)
        return graph, [ids, positions, *own.values()], logits


def _tensors(layout: Decode) -> dict[str, Tensor]:
    return {
        field.name: value
        for field in dataclasses.fields(layout)
        if isinstance(value := getattr(layout, field.name), Tensor)
    }
