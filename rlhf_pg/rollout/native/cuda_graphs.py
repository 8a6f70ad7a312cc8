"""CUDA graphs, the kernels of a decoding step recorded once per shape and launched as one."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def rounded(size: int) -> int:
    """Round up to one of a few sizes: powers of two, from 32 on multiples of 32; 0 stays 0."""
    return -(-size // 32) * 32 if size > 32 else 2 ** (size - 1).bit_length() if size else 0


@dataclasses.dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Any  # its own copy of the inputs, which it reads
    source: Any  # the inputs that were copied there last
    output: Tensor | None


class Graphs:
    """A runner of a step, `step(inputs)` of a dataclass of tensors, that replays recorded kernels.

    Inputs are copied to the places that were recorded, once each. Everything else that a step reads
    or writes must stay in its place; the caller says where that is, and when it changes everything
    is recorded anew.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.where: Any = None
        self.recorded: dict[Any, _Recording | None] = {}  # by shapes; None: they were seen once
        self.works = True

    def __call__(self, step: Callable[[Any], Tensor | None], inputs: Any, where: Any) -> Any:
        """Run the step, and return its output, which is valid until the next one.

        A shape is run once before it is recorded: libraries choose their kernels then.
        """
        if where != self.where:
            self.where = where
            self.recorded.clear()
            self.pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be reused
        key = tuple(tensor.shape for tensor in _tensors(inputs).values())
        if not self.works or key not in self.recorded:
            self.recorded[key] = None
            return step(inputs)
        recording = self.recorded[key]
        if recording is None:
            try:
                recording = self.recorded[key] = self._record(step, inputs)
            except RuntimeError as error:
                logger.warning("decoding without CUDA graphs, which is slower: %s", error)
                self.works = False
                return step(inputs)
        if recording.source is not inputs:
            for place, tensor in zip(
                _tensors(recording.inputs).values(), _tensors(inputs).values(), strict=True
            ):
                place.copy_(tensor)
            recording.source = inputs
        recording.graph.replay()
        return recording.output

    def _record(self, step: Callable[[Any], Tensor | None], inputs: Any) -> _Recording:
        own: dict[str, Any] = {name: x.clone() for name, x in _tensors(inputs).items()}
        copied = dataclasses.replace(inputs, **own)
        graph = torch.cuda.CUDAGraph()
        # Unrelated threads (of tools, of a watchdog) may go on meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = step(copied)
        return _Recording(graph, copied, inputs, output)


def _tensors(inputs: Any) -> dict[str, Tensor]:
    return {
        field.name: value
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
