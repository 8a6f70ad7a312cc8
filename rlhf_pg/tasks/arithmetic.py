"""A task of adding two numbers below 100, one character at a time: "85" should follow "17+68="."""

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Task
from rlhf_pg.tasks.tiny import character_tokenizer

LIMIT = 100
HELD_OUT_PAIRS = 550


def arithmetic() -> Task:
    """Make the task of every sum a+b with a, b < 100; 550 pairs are held out, in both orders."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    random.Random(0).shuffle(pairs)
    return Task(
        name="arithmetic",
        train_dataset=_problems(pairs[HELD_OUT_PAIRS:]),
        eval_dataset=_problems(pairs[:HELD_OUT_PAIRS]),
        reward=exact_match,
        make_tokenizer=lambda: character_tokenizer("0123456789+-*= ?"),
    )


def _problems(pairs: Sequence[tuple[int, int]]) -> Dataset:
    """Make a dataset with each pair in both orders, so that (a,b) and (b,a) share a split."""
    ordered = sorted({pair for a, b in pairs for pair in ((a, b), (b, a))})
    return Dataset.from_dict(
        {"prompt": [f"{a}+{b}=" for a, b in ordered], "answer": [str(a + b) for a, b in ordered]}
    )


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Score 1 if the whole completion is the answer, 0 otherwise."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]
