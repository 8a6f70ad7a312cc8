"""The reward of the recipe smollm2_letters: how many words begin with the letter asked for."""

import re
from typing import Any


def alliteration(completions: list[Any], letter: list[str], **columns: Any) -> list[float]:
    """Score the share of words that begin with a letter, 0 to 1; fewer than four count as four.

    A word that is said again is not one.
    """
    said = [re.findall(r"[^\W\d_]+", one[-1]["content"].lower()) for one in completions]
    return [
        len({word for word in words if word.startswith(first)}) / max(4, len(words))
        for words, first in zip(said, letter, strict=True)
    ]
