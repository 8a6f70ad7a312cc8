"""Fingerprints of weights that are cheap enough for every step."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_pg.rng import mix

WIDTH = 4096  # words of a row, in which a tensor is read


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number for each tensor that changes with any bit of it, (W,) int64.

    With the bytes as 64-bit words x_ij in rows of `WIDTH`, modulo 2^64:

        sum_i a_i sum_j x_ij + sum_j b_j sum_i x_ij

    The weights a and b are noise, so that it matters where a value stands. Of a tensor that is
    sharded, this is of the own shard, counted from its own beginning. It finds accidents; who wants
    two tensors with one number can make them.
    """
    numbers = [_digest(tensor) for tensor in tensors]
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.int64)


def shown(number: int) -> str:
    """Return a number of `digests` in 16 hexadecimal digits."""
    return f"{number % 2**64:016x}"


def _digest(tensor: Tensor) -> Tensor:
    own = _own(tensor).detach().contiguous().view(-1)
    own = own.clone() if own.storage_offset() * own.element_size() % 8 else own  # to read as words
    if own.element_size() * len(own) % 8 == 0:
        words = own.view(torch.int64)
    else:
        words = nn.functional.pad(own.view(torch.uint8), (0, -own.nbytes % 8)).view(torch.int64)
    square = len(words) // WIDTH * WIDTH
    number = (words[square:] * _noise(0, len(words) - square, own.device)).sum()
    if square:
        rows = words[:square].view(-1, WIDTH)
        number = number + (rows.sum(0) * _noise(1, WIDTH, own.device)).sum()
        number = number + (rows.sum(1) * _noise(2, len(rows), own.device)).sum()
    return number


def _own(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return getattr(tensor, "ds_tensor", tensor)  # of ZeRO-3


@functools.cache
def _table(which: int, device: torch.device, count: int = WIDTH) -> Tensor:
    places = torch.arange(count, dtype=torch.int64, device=device)
    # An odd factor loses no bit; a_i + b_j is odd where just one of them is.
    return mix(places + (which << 40)) & ~1 | (which < 2)


def _noise(which: int, count: int, device: torch.device) -> Tensor:
    if count <= WIDTH:
        return _table(which, device)[:count]
    return _table(which, device, 1 << (count - 1).bit_length())[:count]
