"""Conditions on metrics, such as "reward < 0.2 and kl > 1", and the first step at which one holds.

A condition is read, never run: comparisons of a metric with a number, joined by `and` and `or`.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.replay.rounding import is_number

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
NOTHING = ("null", "nan", "none")  # metrics.jsonl has null for a number that is not finite
COMPARISON = re.compile(r"\s*([^\s<>=!]+)\s*(<=|>=|==|!=|<|>)\s*([^\s<>=!]+)\s*")
EXAMPLE = 'write it like "reward < 0.2" or "kl > 1 and entropy <= 0.1"'


@dataclass(frozen=True)
class Term:
    """One comparison: a metric, an operator, and a number or None for null."""

    name: str
    operator: str
    number: float | None

    def holds(self, line: Mapping[str, Any]) -> bool:
        """Return whether it holds in a step; never where the step does not have the metric."""
        if self.name not in line:
            return False
        value = line[self.name]
        is_null = value is None or (isinstance(value, float) and math.isnan(value))
        if self.number is None:
            return is_null == (self.operator == "==")
        if is_null or not is_number(value):
            return False
        return OPERATORS[self.operator](value, self.number)

    def __str__(self) -> str:
        number = "null" if self.number is None else f"{self.number:g}"
        return f"{quoted(self.name)} {self.operator} {number}"


@dataclass(frozen=True)
class Condition:
    """Comparisons joined by `and`, several of which are joined by `or`."""

    alternatives: tuple[tuple[Term, ...], ...]

    @property
    def names(self) -> list[str]:
        """The metrics that it is about."""
        return list(dict.fromkeys(term.name for terms in self.alternatives for term in terms))

    def holding(self, line: Mapping[str, Any]) -> tuple[Term, ...]:
        """Return the comparisons by which it holds in a step; none if it does not."""
        return next((terms for terms in self.alternatives if all(t.holds(line) for t in terms)), ())


def parse(text: str) -> Condition:
    """Read a condition.

    Raises:
        ValueError: it is not one; the message says what to write.
    """
    alternatives = re.split(r"\s+or\s+", text.strip())
    return Condition(
        tuple(tuple(map(_term, re.split(r"\s+and\s+", part))) for part in alternatives)
    )


def _term(text: str) -> Term:
    match = COMPARISON.fullmatch(text)
    if match is None:
        raise ValueError(f"{quoted(text)!r} is no comparison of a metric with a number: {EXAMPLE}")
    name, sign, right = match.groups()
    if right.lower() not in NOTHING:
        return Term(name, sign, _number(right, text))
    if sign not in ("==", "!="):
        raise ValueError(f"{quoted(text)!r}: null is neither more nor less: use == or !=")
    return Term(name, sign, None)


def _number(right: str, text: str) -> float:
    try:
        return float(right)
    except ValueError:
        raise ValueError(f"{quoted(right)!r} in {quoted(text)!r} is no number: {EXAMPLE}") from None


def first_step(
    condition: Condition, lines: Sequence[Mapping[str, Any]]
) -> tuple[int, tuple[Term, ...]] | None:
    """Return the place of the first line at which a condition holds, and by what; or None.

    Raises:
        ValueError: no line has a metric that it names; the message has the nearest names.
    """
    known = {name for line in lines for name in line}
    for name in condition.names:
        if name not in known:
            raise ValueError(f"no step has the metric {quoted(name)!r}{nearest(name, known)}")
    found = ((place, condition.holding(line)) for place, line in enumerate(lines))
    return next(((place, terms) for place, terms in found if terms), None)
