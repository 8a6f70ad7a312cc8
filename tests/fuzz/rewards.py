"""Reward functions that return, raise or do what nobody has asked for."""

import asyncio
import dataclasses
import decimal
import fractions
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from array import array
from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.fuzz.case import STEPS, Case, even_digits, small


class Number:
    """A float by its own account."""

    def __init__(self, account: Callable[[], Any]) -> None:
        self.account = account

    def __float__(self) -> Any:
        return self.account()


class Endless(list[float]):
    """A list that is longer than it says."""

    def __iter__(self) -> Any:
        while True:
            yield 0.5


class Sized:
    def __init__(self, size: Any) -> None:
        self.size = size

    def __len__(self) -> Any:
        return self.size

    def __getitem__(self, i: int) -> float:
        return 0.5


@dataclasses.dataclass
class Judgement:
    score: float = 0.5


def throw(error: BaseException) -> Any:
    raise error


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def nested(depth: int) -> Any:
    value: Any = 0.5
    for _ in range(depth):
        value = [value]
    return value


def closed_stdout() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout.close()


class Odd(Exception):
    """With a name and a text that are not to be printed."""

    def __str__(self) -> str:
        return "\x1b[2J\r" + "x" * 10**6


Odd.__name__ = "Odd\n\x1b]0;"

# What it returns, of n completions.
RETURNED: dict[str, Callable[[int], Any]] = {
    "a generator": lambda n: (0.5 for _ in range(n)),
    "a set": lambda n: set(range(n)),
    "a dict": lambda n: dict.fromkeys(range(n), 0.5),
    "a deque": lambda n: deque([0.5] * n),
    "a UserList": lambda n: UserList([0.5] * n),
    "an array": lambda n: array("d", [0.5] * n),
    "a range": lambda n: range(n),
    "bytes": lambda n: b"1" * n,
    "a memoryview": lambda n: memoryview(b"1" * n),
    "a numpy array of objects": lambda n: np.array([None, "a"] * n, dtype=object)[:n],
    "a numpy array with no axis": lambda n: np.array(0.5),
    "a numpy table of one column": lambda n: np.full((n, 1), 0.5),
    "a masked array": lambda n: np.ma.masked_all(n),
    "numpy dates": lambda n: np.array(["2020-01-01"] * n, dtype="datetime64[D]"),
    "complex numbers": lambda n: [1j] * n,
    "a tensor that wants a gradient": lambda n: torch.ones(n, requires_grad=True),
    "a sparse tensor": lambda n: torch.ones(n).to_sparse(),
    "a tensor on meta": lambda n: torch.ones(n, device="meta"),
    "a quantized bfloat16 tensor": lambda n: torch.ones(n, dtype=torch.bfloat16),
    "float8": lambda n: torch.ones(n).to(torch.float8_e4m3fn),
    "an empty tensor": lambda n: torch.ones(0),
    "fractions": lambda n: [fractions.Fraction(1, 3)] * n,
    "decimals that signal": lambda n: [decimal.Decimal("sNaN")] * n,
    "integers beyond float": lambda n: [10**400] * n,
    "objects": lambda n: [Judgement()] * n,
    "a class": lambda n: Judgement,
    "numbers that raise": lambda n: [Number(lambda: 1 / 0)] * n,
    "numbers that are no numbers": lambda n: [Number(lambda: "a")] * n,
    "a list longer than it says": lambda n: Endless([0.5] * n),
    "what has a length below 0": lambda n: Sized(-1),
    "what has no length but says so": lambda n: Sized("a"),
    "a nest": lambda n: [nested(200)] * n,
    "steps of a wrong number": lambda n: [[0.5] * 99] * n,
    "a coroutine of a coroutine": lambda n: later(later([0.5] * n)),
    "a future that is cancelled": lambda n: later(throw(asyncio.CancelledError())),
    "a lambda": lambda n: lambda: [0.5] * n,
    "texts of numbers": lambda n: ["0.5"] * n,
    "denormals": lambda n: [5e-324] * n,
    "minus zero": lambda n: [-0.0] * n,
    "a tuple in a tuple": lambda n: ((0.5,) * n,),
}
# What it raises.
RAISED: dict[str, Callable[[], Any]] = {
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "an error with an odd name": Odd,
    "a group": lambda: ExceptionGroup("several", [ValueError("a"), OSError("b")]),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "TimeoutError": TimeoutError,
    "BrokenPipeError": BrokenPipeError,
    "a warning": lambda: UserWarning("careful"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("none left"),
    "an error that is its own cause": lambda: (lambda e: e.__setattr__("__cause__", e) or e)(
        ValueError("me")
    ),
}
# What it does beside its work, of which nothing should come.
DONE: dict[str, Callable[[], Any]] = {
    "seeds everything": lambda: (random.seed(0), np.random.seed(0), torch.manual_seed(0)),
    "takes the signal of a timer": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "turns warnings into errors": lambda: warnings.simplefilter("error"),
    "turns logging off": lambda: logging.disable(logging.CRITICAL),
    "makes logging raise": lambda: setattr(logging, "raiseExceptions", True),
    "closes the output": closed_stdout,
    "has no output": lambda: setattr(sys, "stdout", None),
    "writes bytes to the console": lambda: os.write(1, b"\xff\xfe\x00"),
    "stops the collector": gc.disable,
    "allows few frames": lambda: sys.setrecursionlimit(400),
    "allows few files": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    ),
    "leaves a thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "sets deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "asks for anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "empties the environment": os.environ.clear,
    "sets another umask": lambda: os.umask(0o000),
    "loses a temporary directory": lambda: os.environ.update(TMPDIR="/nowhere"),
    "sets threads": lambda: torch.set_num_threads(2),
}


def draw(rng: random.Random, number: int) -> Case:
    """The fault of this number, at a step by chance."""
    faults = [("returns", *item) for item in RETURNED.items()]
    faults += [("raises", *item) for item in RAISED.items()]
    faults += [("", *item) for item in DONE.items()]
    how, what, fault = faults[number % len(faults)]
    when, asynchronous = rng.randrange(STEPS), rng.random() < 0.3
    calls = []

    def act(n: int, completions: Any) -> Any:
        calls.append(n)
        if len(calls) - 1 != when:
            return even_digits(completions)
        if how == "returns":
            return fault(n)
        if how == "raises":
            raise fault()
        fault()
        return even_digits(completions)

    def judge(completions: Any, **_: Any) -> Any:
        return act(len(completions), completions)

    async def judge_later(completions: Any, **_: Any) -> Any:
        return act(len(completions), completions)

    function = judge_later if asynchronous else judge
    return Case(
        kind="reward",
        what=f"a reward function{' (async)' * asynchronous} {how} {what} in step {when + 1}",
        run=lambda output: small(output, reward_funcs=function),
        names=(function.__name__,),
    )
