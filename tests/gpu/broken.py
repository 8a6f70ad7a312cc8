"""Groups whose checks do what those of tests/gpu/groups may come to do on a GPU; for the tests."""

import os
import time
from collections.abc import Iterator

import torch

from tests.gpu.check import Check, Group, Result


def fine() -> Result:
    print("a library that talks")
    return Result("1.5 s", True, 1.5)


def raises() -> Result:
    raise ValueError("the first line\nand a second")


def poisons() -> Result:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def hangs() -> Result:
    time.sleep(3600)
    return fine()


def every_way(device: str) -> Iterator[Check]:
    for check in (fine, raises, os.abort, poisons, hangs, fine):
        yield check.__name__, check
    raise OSError("no space left")


def dies(device: str) -> Iterator[Check]:
    os.abort()
    yield "never", fine


def slow(device: str) -> Iterator[Check]:
    yield "fine", fine
    yield "hangs", hangs
    yield "never", fine


GROUPS = {
    "every_way": Group(every_way, minutes=2, limit=1),
    "dies": Group(dies, minutes=2),
    "slow": Group(slow, minutes=2),
}
