"""Text of others (servers, environments, reward functions), as a log or an error may show it."""

import re

LONGEST = 1000  # characters

_USER = re.compile(r"(?<=://)[^\s/?#@]+@")
_QUERY = re.compile(r"(://[^\s?'\"<>]*\?)[^\s'\"<>]+")


def quoted(text: str) -> str:
    """One line of text that no terminal obeys, cut at `LONGEST` characters, without what may be
    secret in a URL: its user and password, and its query.
    """
    more = f" ... ({len(text)} characters)" if len(text) > LONGEST else ""
    # What is cut off before a secret is found has been cut off behind what is shown.
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text[: 4 * LONGEST]))
    return "".join(map(_visible, text[:LONGEST])) + more


def visible(text: str) -> str:
    """Lines of text that no terminal obeys."""
    return "\n".join("".join(map(_visible, line)) for line in text.split("\n"))


def shown(value: object) -> str:
    """The `repr` of anything, `quoted`."""
    try:
        return quoted(repr(value))
    except Exception as error:
        return f"a {quoted(type(value).__name__)} whose repr raises {quoted(type(error).__name__)}"


def told(error: BaseException) -> str:
    """An exception's type and message, `quoted`."""
    kind = type(error).__name__
    try:
        return quoted(f"{kind}: {error}")
    except Exception:
        return quoted(f"{kind}, whose message cannot be read")


def _visible(character: str) -> str:
    """Escaped, if it is a control character, ends a line or changes its direction."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
