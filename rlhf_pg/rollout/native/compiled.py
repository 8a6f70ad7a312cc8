"""A function by the kernels that torch's compiler makes of it, or as it is where that fails."""

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Compiled:
    """Calls a function through `torch.compile`, for sizes of any number; the first call takes long.

    What fails (no C compiler, no triton, an operation that it does not know) is said once in the
    log, and the function is called itself from then on.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.works = function, True
        self.compiled: Callable[..., Any] = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if self.works:
            try:
                # Or scales and epsilons would be inputs of the graph, and compiled twice.
                with torch._dynamo.config.patch(specialize_float=True):
                    return self.compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler raises
                logger.warning("decoding without torch.compile, which is slower: %s", error)
                self.works = False
        return self.function(*args)
