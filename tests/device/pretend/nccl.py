"""NCCL for the pretend device: gloo, which takes tensors of the device alone."""

import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.device.pretend import library


class _AnyBackend(type):
    def __instancecheck__(cls, other: Any) -> bool:
        name = getattr(other, "name", lambda: "")
        return type(other).__name__ == "Backend" or name() == "nccl"


class _Options:
    def __init__(self, *_: Any, **options: Any) -> None:
        self._timeout: Any = None
        self.is_high_priority_stream = False
        self.config = types.SimpleNamespace()


def install() -> None:
    """Let process groups that ask for NCCL get it."""
    extension: Any = library.load("pretend_nccl")

    class ProcessGroupNCCL(metaclass=_AnyBackend):
        Options = _Options

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            inside = dist.PrefixStore("pretend", store)
            inner = dist.ProcessGroupGloo(inside, rank, size, timeout=options._timeout)
            return extension.make(rank, size, inner)

    everywhere: Any = c10d
    everywhere.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc, assignment]
    everywhere.is_nccl_available = dist.is_nccl_available = lambda: True
    everywhere._NCCL_AVAILABLE = True
    own: Any = torch._C.__dict__
    own["_nccl_version"] = lambda: (2 << 32) | (27 << 16) | 3
    own["_nccl_version_suffix"] = lambda: b""
