"""Quoting of foreign text (servers, environments, reward functions) for a log or an error."""

import re

LONGEST = 1000  # characters

_USER = re.compile(r"(?<=://)[^\s/?#@]+@")
_QUERY = re.compile(r"(://[^\s?'\"<>]*\?)[^\s'\"<>]+")


def quoted(text: str) -> str:
    """Return one line of text without control characters, cut at `LONGEST` characters.

    A URL loses what may be secret in it: user, password and query.
    """
    more = f" ... ({len(text)} characters)" if len(text) > LONGEST else ""
    # Searching this far is enough: a secret cut off here lies beyond what is shown.
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text[: 4 * LONGEST]))
    return "".join(map(_visible, text[:LONGEST])) + more


def visible(text: str) -> str:
    """Return lines of text with control characters escaped."""
    return "\n".join("".join(map(_visible, line)) for line in text.split("\n"))


def shown(value: object) -> str:
    """Return the `repr` of anything, `quoted`."""
    return quoted(repr(value))


def told(error: BaseException) -> str:
    """Return an exception's type and message, `quoted`."""
    return quoted(f"{type(error).__name__}: {error}")


def _visible(character: str) -> str:
    """Escape a character that is a control character, ends a line or changes its direction."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
