"""Proof that vLLM holds the weights that it was given: digests of its tensors, by their names.

vLLM (`model_executor/model_loader/weight_checksum.py`) hashes the bytes of each of its tensors by
SHA-256. It joins some tensors of a checkpoint row by row, and pads the vocabulary with zeros.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.models.streaming import bytes_of
from rlhf_pg.rollout.engine import RolloutError

logger = logging.getLogger(__name__)

EVERY = 50  # hand-overs, of which one is checked

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
ROWS = 64  # a multiple to which the vocabulary is padded
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that a server may compute in
EMPTY = hashlib.sha256().hexdigest()  # of a tensor that vLLM keeps elsewhere, packed for a CPU


def read(answer: Any) -> dict[str, str]:
    """Return the digests in an answer of `/weight_checker`."""
    return {str(name): str(digest) for name, digest in answer["checksums"].items()}


def is_due(hand_overs: int) -> bool:
    """Return whether to check after so many hand-overs."""
    return (hand_overs - 1) % EVERY == 0


def check(
    holder: str,
    held: Mapping[str, str],
    checkpoint: Callable[[str], Tensor | None],
) -> None:
    """Raise RolloutError if what a holder holds is not what it was given (see `compare`)."""
    wrong, compared = compare(held, checkpoint)
    if wrong:
        raise RolloutError(
            f"{holder} holds other weights than it was given, in {len(wrong)} of {compared} "
            f"tensors ({', '.join(wrong[:3])}): start it again, and resume"
        )
    logger.info(
        "%s holds the weights that it was given, in %d of %d tensors",
        holder,
        compared,
        len(held),
    )


def compare(
    held: Mapping[str, str], checkpoint: Callable[[str], Tensor | None]
) -> tuple[list[str], int]:
    """Compare the digests that a server holds with the tensors that it was given.

    Args:
        held: of each tensor, by a name such as `dp0:pp0:pcp0:tp0:model.norm.weight`.
        checkpoint: returns the tensor that was given under a name, or None.

    Returns:
        The names of tensors that differ, and how many were compared: not those that are split over
        GPUs, quantized, or joined in a way that is not known here.
    """
    wrong = []
    compared = 0
    if any(":tp0:" not in key for key in held):
        return [], 0
    for key, digest in held.items():
        name = key.rpartition(":")[2]
        parts = _parts(name, checkpoint)
        if digest == EMPTY or f"{key}_scale" in held or not parts:
            continue
        compared += 1
        if digest not in _digests(parts):
            wrong.append(name)
    return wrong, compared


def _parts(name: str, checkpoint: Callable[[str], Tensor | None]) -> list[Tensor]:
    """Return the tensors that a server's tensor is made of, or none if one is missing."""
    whole = checkpoint(name)
    if whole is not None:
        return [whole]
    for joined, parts in JOINED.items():
        if f".{joined}." not in name:
            continue
        tensors = []
        for part in parts:
            tensor = checkpoint(name.replace(joined, part))
            if tensor is None:
                return []
            tensors.append(tensor)
        return tensors
    return []


def _digests(parts: Sequence[Tensor]) -> Iterator[str]:
    """Yield the digests that the parts have together, in each dtype, without and with padding."""
    rows = sum(len(part) for part in parts)
    padding = -rows % ROWS * parts[0][0].numel()
    for dtype in (parts[0].dtype, *DTYPES):
        digest = hashlib.sha256()
        for part in parts:
            converted = part.to(dtype)
            digest.update(bytes_of(converted))
        yield digest.hexdigest()
        digest.update(bytes(padding * dtype.itemsize))
        yield digest.hexdigest()
