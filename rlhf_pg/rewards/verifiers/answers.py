"""Rewards for answers that can be compared as text or as numbers."""

import re
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, ClassVar

from rlhf_pg.config.fields import config, option
from rlhf_pg.rewards.verifiers.patterns import TooSlow, compiled
from rlhf_pg.rewards.verifiers.verifier import (
    Scores,
    TruthVerifier,
    Unreadable,
    Verifier,
    last_boxed,
    several,
    warn_once,
)


def normalized(text: str, ignore_case: bool) -> str:
    """Return a text with single blanks, none at its ends, and one code per character (NFC)."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


@config
class Exact(TruthVerifier):
    """A reward of 1 for an answer that is the truth, letter by letter, else 0.

    Args:
        ignore_case: take capitals for small letters.
        column: see `TruthVerifier`; a list there holds several right answers.
    """

    kind: ClassVar[str] = "exact"
    ignore_case: bool = False

    def read(self, truth: Any) -> set[str]:
        return {normalized(str(one), self.ignore_case) for one in several(truth)}

    def judge(self, answers: Sequence[str], truths: Sequence[set[str]]) -> Scores:
        pairs = zip(answers, truths, strict=True)
        return [float(normalized(answer, self.ignore_case) in right) for answer, right in pairs]


# ------------------------------------------------------------------------------------- numbers

_BLANKS = "\u00a0\u2009\u202f"
_DIGITS = rf"(?:\d{{1,3}}(?:[,{_BLANKS}]\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_UNSIGNED = rf"[$€£¥]?(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}(?!\w))?"
# A sign behind a word or a bracket is an operation, or the hyphen of a range.
_NUMBER = re.compile(
    rf"(?<![\w.])((?:(?<![\w)])[-+])?{_UNSIGNED})(?:\s*/\s*([-+]?{_UNSIGNED}))?", re.ASCII
)
_SPELLINGS = str.maketrans({"\u2212": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-"})
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_IGNORED = re.compile(rf"[,$€£¥\s{_BLANKS}]")
_ROUNDING = Context(prec=60)


def number_in(text: str) -> Decimal | None:
    r"""Return the number that a text gives as its answer; None if there is none.

    That is the first one behind the last `####` (GSM8K), else the last one in the last `\boxed{}`,
    else the last one of all. Thousands may be separated, and a fraction is one number.
    """
    text = text.translate(_SPELLINGS).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _FRACTION.sub(r"\1/\2", text)
    _, marked, behind = text.rpartition("####")
    if marked and (first := _NUMBER.search(behind)):
        return _value(first)
    for part in (last_boxed(text) or "", text):
        if last := deque(_NUMBER.finditer(part), maxlen=1):
            return _value(last[0])
    return None


def _value(match: re.Match[str]) -> Decimal | None:
    above, below = (Decimal(_IGNORED.sub("", group or "1")) for group in match.groups())
    try:
        return above if match[2] is None else _ROUNDING.divide(above, below)
    except ArithmeticError:  # division by zero
        return None


@config
class Numeric(TruthVerifier):
    """A reward of 1 for an answer whose number is that of the truth, else 0; see `number_in`.

    Args:
        abs_tol, rel_tol: largest difference, absolute or as a share of the larger number, as in
            `math.isclose`.
        column: see `TruthVerifier`; a list there holds several right answers.
    """

    kind: ClassVar[str] = "numeric"
    abs_tol: float = option(1e-6, ge=0)
    rel_tol: float = option(0.0, ge=0)

    def read(self, truth: Any) -> list[Decimal]:
        numbers = [number_in(str(one)) for one in several(truth)]
        if found := [one for one in numbers if one is not None]:
            return found
        raise Unreadable("there is no number in it")

    def judge(self, answers: Sequence[str], truths: Sequence[list[Decimal]]) -> Scores:
        said = map(number_in, answers)
        return [
            float(answer is not None and any(self._close(answer, one) for one in right))
            for answer, right in zip(said, truths, strict=True)
        ]

    def _close(self, a: Decimal, b: Decimal) -> bool:
        largest = max(abs(a), abs(b))
        allowed = max(
            Decimal(str(self.abs_tol)), _ROUNDING.multiply(Decimal(str(self.rel_tol)), largest)
        )
        return a == b or abs(_ROUNDING.subtract(a, b)) <= allowed


# ------------------------------------------------------------------------------------ patterns


@config
class Regex(Verifier):
    """A reward of 1 for a completion in which a pattern is found, else 0.

    Args:
        pattern: regular expression, searched in the whole completion.
        column: column with the truth, where finding is not enough: the pattern's first group, or
            all of it if it has none, is then compared with the truth where it is found last.
        ignore_case: take capitals for small letters.
        whole: the pattern has to fit the completion from its first to its last character.
        timeout: seconds that a completion may take; one that takes longer gets 0, with a warning.
    """

    kind: ClassVar[str] = "regex"
    pattern: str
    column: str | None = None
    ignore_case: bool = False
    whole: bool = False
    timeout: float = option(1.0, gt=0)

    def __post_init__(self) -> None:
        compiled(self.pattern, self.ignore_case)

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        if self.column is None:
            return [float(self._found(text) is not None) for text in texts]
        truths = self.truths(self.column, columns)
        return [self._compared(text, truth) for text, truth in zip(texts, truths, strict=True)]

    def _compared(self, text: str, truth: Any) -> float | None:
        if truth is None:
            return None
        found = self._found(text)
        right = {normalized(str(one), self.ignore_case) for one in several(truth)}
        return float(found is not None and normalized(found, self.ignore_case) in right)

    def _found(self, text: str) -> str | None:
        try:
            return compiled(self.pattern, self.ignore_case).last(text, self.whole, self.timeout)
        except TooSlow as error:
            warn_once(f"reward {self.kind}: {error}; such a completion gets 0")
            return None
