"""Tensors of two safetensors files compared bit by bit, whatever their type, without torch."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.replay.rounding import Rounding

LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it
# Types that numpy has. BF16 is the upper half of F32; others are compared as bytes.
TYPES = dict(
    zip(
        ("F64", "F32", "F16", "BF16", "BOOL", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"),
        ("<f8", "<f4", "<f2", "<u2", "|u1", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1"),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that two files do not have in common.

    Attributes:
        note: where it differs first, and in how many elements.
    """

    name: str
    a: Any
    b: Any
    note: str = ""


def tensor_differences(a: Path, b: Path, rounding: Rounding) -> Iterator[TensorDifference]:
    """Yield the tensors of two files that differ.

    Raises:
        ValueError: a file is no safetensors file any more; the message names it.
    """
    first, second = _header(a), _header(b)
    for name in {**first, **second}:
        if name not in first or name not in second:
            yield TensorDifference(name=name, a=name in first, b=name in second)
            continue
        x, y = first[name], second[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            yield TensorDifference(name=name, a=f"{x.dtype} {x.shape}", b=f"{y.dtype} {y.shape}")
            continue
        difference = _compared(name, x, _raw(a, x), _raw(b, y), rounding)
        if difference is not None:
            yield difference


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _header(path: Path) -> dict[str, _Entry]:
    """Read where the tensors of a file are.

    Raises:
        ValueError: it is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            stored = json.loads(file.read(length))
        stored.pop("__metadata__", None)
        found = {
            name: _Entry(
                x["dtype"], tuple(x["shape"]), *(8 + length + k for k in x["data_offsets"])
            )
            for name, x in stored.items()
        }
        size = path.stat().st_size
        if any(not 0 <= x.start <= x.end <= size for x in found.values()):
            raise ValueError("it ends within a tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    return found


def _raw(path: Path, entry: _Entry) -> NDArray[Any]:
    count = entry.end - entry.start
    if count == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset=entry.start, shape=(count,))


def _compared(
    name: str, entry: _Entry, x: NDArray[Any], y: NDArray[Any], rounding: Rounding
) -> TensorDifference | None:
    if np.array_equal(x, y):
        return None
    kind = np.dtype(TYPES.get(entry.dtype, "|u1"))
    bits = np.dtype(f"<u{kind.itemsize}")
    apart = np.flatnonzero(x.view(bits) != y.view(bits))
    first = _numbers(x.view(kind), entry.dtype)
    second = _numbers(y.view(kind), entry.dtype)
    if not rounding.is_exact and _near(first, second, rounding):
        return None
    i = int(apart[0])
    whole = math.prod(entry.shape) == len(x.view(bits))
    index = [int(k) for k in np.unravel_index(i, entry.shape)] if whole and entry.shape else i
    return TensorDifference(
        name=name,
        a=first[i].item(),
        b=second[i].item(),
        note=f"element {index}, and {len(apart)} of {len(x.view(bits))} differ",
    )


def _numbers(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype != "BF16":
        return stored
    return (stored.astype(np.uint32) << 16).view(np.float32)


def _near(x: NDArray[Any], y: NDArray[Any], rounding: Rounding) -> bool:
    """Return whether two tensors are near as vectors."""
    if x.dtype.kind != "f":
        return False
    x, y = x.astype(np.float64), y.astype(np.float64)
    size = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
    bound = rounding.rtol * size + rounding.floor * math.sqrt(len(x))
    return bool(np.linalg.norm(x - y) <= bound)
