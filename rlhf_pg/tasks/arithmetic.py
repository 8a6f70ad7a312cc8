"""Adding two numbers below 100, one character at a time: "17+68=" is to be continued by "85"."""

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_pg.tasks.task import Task
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder

LIMIT = 100
HELD_OUT_PAIRS = 550


def arithmetic() -> Task:
    """Every sum a+b with a, b < 100: 550 unordered pairs are held out, in both orders."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    random.Random(0).shuffle(pairs)
    return Task(
        name="arithmetic",
        train_dataset=_problems(pairs[HELD_OUT_PAIRS:]),
        eval_dataset=_problems(pairs[:HELD_OUT_PAIRS]),
        reward=exact_match,
        new_model=_new_model,
    )


def _problems(pairs: Sequence[tuple[int, int]]) -> Dataset:
    """Each pair in both orders; (a,b) and (b,a) are always in the same split."""
    ordered = sorted({pair for a, b in pairs for pair in ((a, b), (b, a))})
    return Dataset.from_dict(
        {
            "prompt": [f"{a}+{b}=" for a, b in ordered],
            "answer": [str(a + b) for a, b in ordered],
        }
    )


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 if the whole completion is the answer, 0 otherwise."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def _new_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = character_tokenizer("0123456789+-*= ?")
    return tiny_decoder(tokenizer), tokenizer
