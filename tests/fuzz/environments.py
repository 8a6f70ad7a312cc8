"""Environments that begin, answer or end as they should not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_pg.rollout.multi_turn.environment import Observation
from tests.fuzz.case import Case, small


class Four(NamedTuple):
    messages: str
    reward: float
    done: bool
    info: dict[str, Any]


class Rude:
    """Answers every attribute that it is asked for with an error."""

    def __getattribute__(self, name: str) -> Any:
        raise OSError(f"no {name}")


class Bool:
    def __bool__(self) -> Any:
        raise ArithmeticError("who knows")


class Sly(str):
    def __len__(self) -> int:
        return -1

    def __eq__(self, other: object) -> bool:
        raise OSError("do not compare")

    __hash__ = str.__hash__


def many(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "1"}] * count


def steps() -> Any:
    yield ("1", 0.0, False)


CHAT = [{"role": "user", "content": "1"}]
# What `step` returns.
ANSWERS: dict[str, Callable[[], Any]] = {
    "a list of three": lambda: ["1", 0.5, False],
    "a tuple of four": lambda: Four("1", 0.5, False, {}),
    "an empty tuple": lambda: (),
    "a generator": steps,
    "text beyond all limits": lambda: ("1" * 1000, 0.5, False),
    "no text": lambda: ("", 0.5, False),
    "blanks": lambda: ("   ", 0.5, False),
    "text with unknown letters": lambda: ("日本", 0.5, False),
    "text with a NUL": lambda: ("1\x00", 0.5, False),
    "half a surrogate": lambda: ("\ud800", 0.5, False),
    "names of special tokens": lambda: ("<eos><pad><assistant>", 0.5, False),
    "bytes": lambda: (b"1", 0.5, False),
    "text of a class of its own": lambda: (Sly("1"), 0.5, False),
    "numpy text": lambda: (np.str_("1"), 0.5, False),
    "messages to a text": lambda: (CHAT, 0.5, False),
    "nothing, and goes on": lambda: (None, 0.5, False),
    "nothing, and ends": lambda: (None, None, True),
    "infinity": lambda: ("1", float("-inf"), False),
    "a reward of many": lambda: ("1", np.ones(3), False),
    "a reward of one": lambda: ("1", np.ones((1, 1)), False),
    "a tensor with a gradient": lambda: ("1", torch.ones((), requires_grad=True), False),
    "a reward of text": lambda: ("1", "0.5", False),
    "a reward of complex": lambda: ("1", 1j, False),
    "a reward that is immense": lambda: ("1", 10**400, False),
    "a done that does not know": lambda: ("1", 0.5, Bool()),
    "a done of text": lambda: ("1", 0.5, "False"),
    "a done of many": lambda: ("1", 0.5, np.zeros(2)),
    "a done of NaN": lambda: ("1", 0.5, float("nan")),
    "an observation in another": lambda: Observation(Observation("1"), 0.5, False),
    "an exception": lambda: ValueError("returned"),
    "a class": lambda: Observation,
}


def throw(error: BaseException) -> Any:
    raise error


# What it raises, from `step` or `reset`.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "StopIteration": StopIteration,
    "GeneratorExit": GeneratorExit,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "UnicodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "an escape": lambda: RuntimeError("\x1b[2J\r\n" * 1000),
    "a group": lambda: BaseExceptionGroup("several", [KeyError("a")]),
}
# What `reset` returns.
PROMPTS: dict[str, Callable[[], Any]] = {
    "no text": lambda: "",
    "text with unknown letters": lambda: "日",
    "text beyond all positions": lambda: "1" * 100,
    "no messages": list,
    "messages without a role": lambda: [{"content": "1"}],
    "messages of numbers": lambda: [{"role": "user", "content": 5}],
    "roles of numbers": lambda: [{"role": 5, "content": "1"}],
    "many messages": lambda: many(60),
    "messages with an unknown role": lambda: [{"role": "judge", "content": "1"}],
    "itself": lambda: Rude(),
    "a number": lambda: 7,
}
# In place of the factory.
FACTORIES: dict[str, Callable[[], Any]] = {
    "makes nothing": lambda: lambda: None,
    "makes what answers nothing": lambda: Rude,
    "raises": lambda: lambda: throw(OSError("no port is left")),
    "wants more": lambda: lambda needed: needed,
}


def draw(rng: random.Random, number: int) -> Case:
    """The fault of this number, in every episode or by chance."""
    faults = [("step returns", *item) for item in ANSWERS.items()]
    faults += [("step raises", *item) for item in ERRORS.items()]
    faults += [("reset raises", *item) for item in ERRORS.items()]
    faults += [("reset returns", *item) for item in PROMPTS.items()]
    faults += [("the factory", *item) for item in FACTORIES.items()]
    where, what, fault = faults[number % len(faults)]
    share, chance = rng.choice([0.3, 1.0]), random.Random(rng.random())

    class Environment:
        def reset(self, example: dict[str, Any]) -> Any:
            if where.startswith("reset") and chance.random() < share:
                return self.fail()
            return example["prompt"]

        def step(self, completion: str) -> Any:
            if where.startswith("step") and chance.random() < share:
                return self.fail()
            return "1", 0.5, chance.random() < 0.5

        def fail(self) -> Any:
            made: Any = fault()
            if where.endswith("raises"):
                raise made
            return made

    def run(output: Path) -> Any:
        factory = fault() if where == "the factory" else Environment
        sizes = {"max_completion_length": 12, "environment_timeout": 5.0}
        return small(output, environment_factory=factory, reward_funcs=[], **sizes)

    return Case(
        kind="environment",
        what=f"{where} {what}, in {share:.0%} of the episodes",
        run=run,
        names=("environment", "reset", "step", "episode"),
    )
