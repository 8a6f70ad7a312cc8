"""A reward for mathematical answers, compared as mathematics in processes that can be killed."""

import logging
import re
from functools import cache, lru_cache
from typing import Any

from rlhf_pg.rewards.functions import CallFailed
from rlhf_pg.rewards.pool import Pool
from rlhf_pg.rewards.verifiers.texts import (
    Said,
    Scores,
    Seconds,
    require,
    several,
    share_of_cores,
)

LONGEST = 10_000  # characters at a completion's end that are looked at
MEMORY = 4 << 30  # bytes of a process
LATEX = re.compile(r"\\boxed|\\\(|\\\[|\$[^$]+\$")


@cache
def workers() -> Pool:
    """Return the processes that compare answers."""
    return Pool(share_of_cores(), MEMORY, _ready)


def math(
    said: Said, *, boxed: bool = False, timeout: Seconds = 5.0, column: str = "answer"
) -> Scores:
    r"""Reward an answer that is mathematically the truth with 1, else with 0, by math-verify.

    What stands in `\boxed{}` counts before all else; several boxes are one set. The last
    `LONGEST` characters are looked at.

    Args:
        boxed: nothing but `\boxed{}` counts; otherwise any formula or number that can be found.
        timeout: seconds that one comparison may take; one that takes longer gives 0.
        column: with the truth: an expression, a solution with its answer boxed or behind `####`, or
            a list of right answers.
    """
    require("math_verify", "math")

    def read(truth: Any) -> list[str]:
        return [str(one) for one in several(truth)]

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        pairs = zip(truths, answers, strict=True)
        asked = [
            workers().schedule(compare, golds, answer[-LONGEST:], boxed, timeout=timeout)
            for golds, answer in pairs
        ]
        scores: Scores = []
        for future in asked:
            try:
                scores.append(future.result())
            except CallFailed:
                scores.append(0.0)
        return scores

    return said.against(column, read, judge)


def compare(golds: list[str], answer: str, boxed: bool) -> float | None:
    """Return 1 if an answer is one of the golds, else 0; None if none of these can be parsed.

    SymPy may compute for ages, and in C, where no exception reaches it.
    """
    from math_verify import verify

    rights = [right for gold in golds if (right := _parsed_gold(gold))]
    if not rights:
        return None
    try:
        said = _parsed(answer.replace("\u2212", "-"), boxed)
        return float(any(verify(right, said, timeout_seconds=None) for right in rights))
    except (Exception, RecursionError, MemoryError):
        return 0.0


@lru_cache(maxsize=256)
def _parsed_gold(gold: str) -> list[Any]:
    """Parse a truth: an expression alone, a solution with its answer boxed, or behind `####`."""
    gold = gold.rpartition("####")[2].strip().replace("\u2212", "-")
    try:
        right = _parsed(gold, False) if LATEX.search(gold) else []
        return right or _parsed(f"\\boxed{{{gold}}}", True)
    except (Exception, RecursionError, MemoryError):
        return []


def _parsed(text: str, boxed: bool) -> list[Any]:
    """Return what math-verify finds in a text, `\\boxed{}` before all else; or only in that."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if boxed and "\\boxed{" not in text:
        return []
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    kinds = [latex] if boxed else [latex, ExprExtractionConfig()]
    return list(parse(text, kinds, parsing_timeout=None))


def _ready() -> None:
    """Import in a new process what takes a second, before the time of a comparison begins."""
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)
