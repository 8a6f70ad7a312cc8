"""Verdicts that a judge has given, kept so that nothing is asked twice, by a resumed run either."""

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.boundary.user_code import finite

logger = logging.getLogger(__name__)


class AnswerCache:
    """Numbers by text, the most recently used ones; with a file, also those of earlier runs.

    The file has one JSON line per answer. Lines that cannot be read, after a crash, are passed
    over; where there are more than twice `size`, the last `size` are kept. Several processes may
    append to one file; each sees what was there when it began.

    Args:
        size: answers that are kept.
        path: the file; None keeps them in memory alone.

    Raises:
        ValueError: the file cannot be read or written.
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self.size, self.path = size, path
        self._answers: OrderedDict[str, float] = OrderedDict()
        self._has_failed = False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:  # so that it can be appended to
                file.seek(0)
                text = file.read()
                if text and not text.endswith(b"\n"):  # a crash has torn the last line
                    file.write(b"\n")
                count = self._take(_answers(text.splitlines()))
            if count > 2 * size:
                self._rewrite(path)
        except OSError as error:
            raise ValueError(
                f"the cache of answers {quoted(str(path))} cannot be used ({told(error)}): name "
                "another file, or none"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process begin with what is in the file."""
        return AnswerCache, (self.size, self.path)

    def __len__(self) -> int:
        """Return how many answers are in memory."""
        return len(self._answers)

    def get(self, key: str) -> float | None:
        """Return an answer, which then counts as used; None if it is not known."""
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def put(self, key: str, answer: float) -> None:
        """Keep an answer; a full disk is warned of once, and the file then lacks it."""
        self._keep(key, answer)
        if self.path is None:
            return
        try:
            with self.path.open("ab", buffering=0) as file:  # one write: no line is torn by another
                file.write(_line(key, answer))
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s lacks answers from here on: %s", self.path, error)
            self._has_failed = True

    def _keep(self, key: str, answer: float) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self.size:
            self._answers.popitem(last=False)

    def _take(self, answers: Iterator[tuple[str, float] | None]) -> int:
        """Keep the last answers of a file, and return how many lines it has."""
        count = 0
        for answer in answers:
            count += 1
            if answer is not None:
                self._keep(*answer)
        return count

    def _rewrite(self, path: Path) -> None:
        """Replace the file by one of what is kept; what others append meanwhile is asked again."""
        whole = path.with_name(f"partial-{os.getpid()}-{path.name}")
        whole.write_bytes(b"".join(_line(*answer) for answer in self._answers.items()))
        whole.replace(path)


def _line(key: str, answer: float) -> bytes:
    return json.dumps({"key": key, "answer": answer}).encode() + b"\n"


def _answers(lines: Sequence[bytes]) -> Iterator[tuple[str, float] | None]:
    """Return the key and the answer of each line; None for a line that has none."""
    for line in lines:
        try:
            read = json.loads(line)
            key, answer = read["key"], finite(read["answer"])
        except (ValueError, KeyError, TypeError, RecursionError):
            key = answer = None
        yield (key, answer) if isinstance(key, str) and answer is not None else None
