"""A task of counting on in equal steps, a line for each: "a+5=02,b+5=07" and so on to line x should
follow "+5=97,", on a counter that goes from 99 to 00.

Only the last number is paid for, some 170 characters after the prompt.
"""

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Demonstration, Task
from rlhf_pg.tasks.tiny import character_tokenizer

LIMIT = 100
STEPS = range(1, 6)
LINES = "abcdefghijklmnopqrstuvwx"
PROBLEMS, HELD_OUT = 128, 256  # few to train on, so that every epoch meets the same prompts again
DEMONSTRATIONS = 8192
FORGETS = 0.15  # share of demonstrated carries that are left out: 92 or 03 for 97+5 or 08+5


def counting() -> Task:
    """Make the task of 24 steps of 1 to 5 from below 100: 128 problems, and 256 held out."""
    problems = [(start, step) for start in range(LIMIT) for step in STEPS]
    random.Random(0).shuffle(problems)
    return Task(
        name="counting",
        train_dataset=_dataset(problems[HELD_OUT : HELD_OUT + PROBLEMS]),
        eval_dataset=_dataset(problems[:HELD_OUT]),
        reward=last_number,
        make_tokenizer=lambda: character_tokenizer(f"0123456789+=,{LINES}"),
        max_positions=256,
        demonstrate=lambda: _demonstrations(problems[HELD_OUT:], random.Random(1)),
    )


def last_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Score 1 if what stands behind the last "=" is the answer, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(said.rpartition("=")[2] == right) for said, right in pairs]


def _dataset(problems: Sequence[tuple[int, int]]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(*problem) for problem in problems],
            "answer": [_shown(start + step * len(LINES)) for start, step in problems],
        }
    )


def _prompt(start: int, step: int) -> str:
    """Make it like a line, so that what is learnt of the others holds for the first one, too."""
    return f"+{step}={_shown(start)},"


def _shown(number: int) -> str:
    return f"{number % LIMIT:02}"


def _demonstrations(
    problems: Sequence[tuple[int, int]], chance: random.Random
) -> list[Demonstration]:
    """Demonstrate counting by someone who forgets to carry, and counts on from there."""
    return [_counted(*chance.choice(problems), chance) for _ in range(DEMONSTRATIONS)]


def _counted(start: int, step: int, chance: random.Random) -> Demonstration:
    lines, number = [], start
    for letter in LINES:
        carries = number % 10 + step > 9
        number += step - (10 if carries and chance.random() < FORGETS else 0)
        lines.append(f"{letter}+{step}={_shown(number)}")
    return Demonstration(_prompt(start, step), [",".join(lines)], [])
