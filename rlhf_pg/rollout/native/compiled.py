"""Compilation of a function by torch, with the plain function as a fallback."""

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Compiled:
    """A function called through `torch.compile`, for any sizes; the first call takes long.

    A failure (no C compiler, no triton, an unknown operation) is logged once, and the plain
    function is called from then on.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.works = function, True
        self.compiled: Callable[..., Any] = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if self.works:
            try:
                # Otherwise scales and epsilons become inputs of the graph, compiled twice.
                with torch._dynamo.config.patch(specialize_float=True):
                    return self.compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise anything
                logger.warning("decoding without torch.compile, which is slower: %s", error)
                self.works = False
        return self.function(*args)
