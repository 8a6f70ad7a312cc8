"""What can be imported, before anything is computed: a missing wheel is seen at once."""

import importlib
from collections.abc import Iterator
from functools import partial

from tests.gpu.check import Check, Result

NEEDED = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "rlhf_pg")
OPTIONAL = ("triton", "trl", "deepspeed", "bitsandbytes", "liger_kernel", "vllm")


def imports(device: str) -> Iterator[Check]:
    """Each package with its version."""
    for name in (*NEEDED, *OPTIONAL):
        yield name, partial(imported, name)


def imported(name: str) -> Result:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Result(f"missing: {error}", False if name in NEEDED else None)
    return Result(str(getattr(module, "__version__", "is there")), True)
