"""Quote foreign text (from servers, environments, reward functions) for logs and errors."""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST = 1000  # characters
LIBRARIES = (f"{Path(__file__).parents[1]}/", f"{Path(traceback.__file__).parent}/", "<")

# Names of keys whose values are secrets.
SECRET = re.compile(
    r"token|auth|cookie|pwd|.*((api|auth|access|bearer|client|hf|private|secret)[-_]?(key|token)"
    r"|passw(or)?d|passphrase|secret|authorization|credential)s?",
    re.IGNORECASE,
)
USER = re.compile(r"(?<=://)[^\s/?#@]+@")
_QUERY = re.compile(r"(://[^\s?'\"<>]*\?)[^\s'\"<>]+")


def quote(text: str) -> str:
    """Return one line of text without control characters, truncated to `LONGEST` characters.

    Possible secrets in URLs are removed: user, password and query.
    """
    more = f" ... ({len(text)} characters)" if len(text) > LONGEST else ""
    # Searching this far is enough: a secret cut off here is beyond the shown text.
    text = _QUERY.sub(r"\1***", USER.sub("***@", text[: 4 * LONGEST]))
    return visible(text[:LONGEST]).replace("\n", r"\n") + more


def visible(text: str) -> str:
    """Escape characters that control, end a line or change its direction, except newlines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def texts(value: Any, *keys: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the texts in nested mappings and lists, each with its keys."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts(inner, *keys, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, *keys)
    elif isinstance(value, str):
        yield keys, value


def show(value: object) -> str:
    """Return the `repr` of anything, as `quote` does a text."""
    return quote(repr(value))


def tell(error: BaseException) -> str:
    """Return an exception's type and message, and its cause's, as `quote` does a text."""
    message = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if cause is not None and str(cause) not in message:
        message += f" ({type(cause).__name__}: {cause})"
    return quote(message)


@contextmanager
def about(name: str) -> Iterator[None]:
    """Prefix a `ValueError` raised inside with the name of a setting."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def frames(error: BaseException) -> str:
    """Return the frames of users' own files in a traceback, each as Python prints it."""
    trace = traceback.extract_tb(error.__traceback__)
    own = [x for x in trace if not (x.filename.startswith(LIBRARIES) or "-packages/" in x.filename)]
    return visible(f"\n{''.join(traceback.format_list(own))}".rstrip())
