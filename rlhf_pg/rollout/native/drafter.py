"""The drafts of a session."""

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlhf_pg.rollout.engine import Request
from rlhf_pg.rollout.native.drafts import CONTEXT, Contexts, Draft, History, Writer
from rlhf_pg.rollout.native.slots import Row


class Drafter:
    """The drafts of one session.

    Args:
        history: of the engine; it is added to.
    """

    def __init__(self, history: History) -> None:
        self.history, self.pace = history, history.pace
        self.awake = self.pace.begin()
        self.contexts: dict[bytes, Contexts] = {}

    def enter(self, rows: Sequence[Row], first: Sequence[int]) -> None:
        """Begin to follow rows, with their first tokens."""
        for row, token in zip(rows, first, strict=True):
            key = _key(row.prompt.request)
            if key not in self.contexts:
                prompt = array("i", row.prompt.request.tokens)
                self.contexts[key] = Contexts([prompt, *self.history.of(key)])
            row.writer = Writer(self.contexts[key], row.prompt.request.tokens)
            row.writer.write([token])

    def leave(self, row: Row, tokens: Sequence[int]) -> None:
        """Keep what a row has written."""
        request = row.prompt.request
        self.history.add(_key(request), array("i", [*request.tokens[-CONTEXT:], *tokens]))

    def drafts(self, rows: Sequence[Row]) -> list[Draft] | None:
        """Return a draft, which may be empty, for each row; None if there are none."""
        if not self.pace.tries(len(rows)):
            return None
        writers = ((row.writer, row.left) for row in rows if row.writer is not None)
        drafts = [writer.draft(self.pace, left - 1) for writer, left in writers]
        return drafts if any(drafts) else None

    @contextmanager
    def timed(self, rows: Sequence[Row], drafts: bool) -> Iterator[list[list[int]]]:
        """Measure a pass, which puts the new tokens of each row into the list that is given."""
        new: list[list[int]] = []
        start = time.perf_counter()
        yield new
        seconds = time.perf_counter() - start
        self.pace.passed(len(rows), sum(map(len, new)), drafts, seconds)
        for row, tokens in zip(rows, new, strict=True):
            if row.writer is not None:
                row.writer.write(tokens)


def _key(request: Request) -> bytes:
    """Return the prompt, of which later turns of an episode are continuations."""
    tokens = request.tokens
    return array("i", tokens[: len(tokens) - request.position]).tobytes()
