"""The versions of what a run computes with."""

import importlib.metadata
import platform

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
ALSO = ("tokenizers", "safetensors", "numpy", "deepspeed", "vllm", "bitsandbytes")


def version(package: str) -> str:
    """Return the version of a package, or "unknown"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, by name."""
    found = {name: version(name) for name in ("rlhf-pg", *PACKAGES, *ALSO)}
    there = {name: number for name, number in found.items() if number != "unknown"}
    return {"python": platform.python_version(), **there}
