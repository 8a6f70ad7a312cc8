"""Proof that vLLM holds the weights that it was given: digests of its tensors, by their names.

vLLM (`model_executor/model_loader/weight_checksum.py`) hashes the bytes of each of its tensors by
SHA-256. It joins some tensors of a checkpoint row by row, and pads the vocabulary with zeros.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.models.streaming import bytes_of
from rlhf_pg.rollout.engine import RolloutError

logger = logging.getLogger(__name__)

EVERY = 50  # hand-overs, of which one is checked

# Modules whose weights vLLM keeps byte by byte, as do those with "norm" in their name. Others it
# may transpose (GPT-2) or reorder (GPT-NeoX).
PLAIN = {"o_proj", "down_proj", "embed_tokens", "lm_head", "qkv_proj", "gate_up_proj"}
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


def check(holder: str, held: Mapping[str, str], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RolloutError if what a holder holds is not what it was given (see `compare`)."""
    wrong, compared = compare(held, weights)
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
    held: Mapping[str, str], weights: Iterable[tuple[str, Tensor]]
) -> tuple[list[str], int]:
    """Compare the digests that vLLM holds with the weights that it was given.

    Args:
        held: the digest of each tensor, by a name such as `dp0:pp0:pcp0:tp0:model.norm.weight`.
        weights: tensors by their names in a checkpoint. All are taken, one at a time, since
            gathering sharded ones is collective.

    Returns:
        The names of tensors that differ, and how many were compared: not those that are split over
        GPUs or quantized, or that vLLM keeps in a form that is not known here.
    """
    digests = defaultdict[str, set[str]](set)  # of all replicas
    if all(":tp0:" in key for key in held):
        for key, digest in held.items():
            digests[key.rpartition(":")[2]].add(digest)
    wrong = []
    compared = 0
    waiting = dict[str, dict[str, Tensor]]()  # parts of joined tensors that are not complete
    for name, tensor in weights:
        target, names = _target(name)
        if digests.get(target, {EMPTY}) == {EMPTY} or f"{target}_scale" in digests or not names:
            continue
        parts = waiting.setdefault(target, {})
        parts[name] = tensor
        if len(parts) == len(names):
            del waiting[target]
            compared += 1
            given = _digests([parts[part] for part in names])
            if all(digests[target] != {digest} for digest in given):
                wrong.append(target)
    return wrong, compared


def _target(name: str) -> tuple[str, list[str]]:
    """Return the name of vLLM's tensor with a checkpoint's tensor, and the names of its parts: none
    if its form is not known here.
    """
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    for joined, parts in JOINED.items():
        if module in parts:
            names = [f"{parent}.{part}.{kind}" for part in parts]
            return f"{parent}.{joined}.{kind}", names
    if module in PLAIN or "norm" in module:
        return name, [name]
    return name, []


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
