"""Regular expressions of users, with a limit on time, since a pattern may backtrack for ages."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown


class TooSlow(TimeoutError):
    """An error for a pattern that takes too long on a text."""


@dataclass(frozen=True)
class Pattern:
    """A compiled regular expression of the package `regex`, which has Python's syntax and more."""

    compiled: Any

    def last(self, text: str, whole: bool, seconds: float) -> str | None:
        """Return the first group, or all if there is none, of where the pattern is found last.

        Args:
            whole: the pattern has to fit the whole text.
            seconds: time that the search may take, in whatever thread.

        Raises:
            TooSlow: it takes longer.
        """
        try:
            if whole:
                match = self.compiled.fullmatch(text, timeout=seconds)
            else:
                found = deque(self.compiled.finditer(text, timeout=seconds), maxlen=1)
                match = found[0] if found else None
        except TimeoutError as error:
            raise TooSlow(
                f"the pattern {shown(self.compiled.pattern)} takes more than {seconds:g} s on a "
                f"text of {len(text)} characters"
            ) from error
        if match is None:
            return None
        return (match[1] or "") if self.compiled.groups else str(match[0])


@lru_cache(maxsize=64)
def compiled(pattern: str, ignore_case: bool = False) -> Pattern:
    """Compile a pattern once.

    Raises:
        ValueError: it is no regular expression.
    """
    import regex

    try:
        return Pattern(regex.compile(pattern, regex.IGNORECASE if ignore_case else 0))
    except regex.error as error:
        raise ValueError(
            f"pattern {shown(pattern)} is no regular expression: {quoted(str(error))}"
        ) from error
