"""Text for a terminal: names of rewards, tensors and files are anybody's, and control nothing."""

import logging

from rich.text import Text

from rlhf_pg.boundary.quoted import visible


def say(text: str) -> None:
    """Print lines with their control characters escaped."""
    print(visible(text), flush=True)


def literal(text: str) -> Text:
    """Return a text for a table, in which no markup counts and no character controls."""
    return Text(visible(text))


def escape_warnings() -> None:
    """Escape the warnings that Python prints for a program without logging of its own."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
