"""Prompts that are read as the run needs them, in an order that one number resumes."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from datasets import IterableDataset

from rlhf_pg.data.chat import TooLong

logger = logging.getLogger(__name__)

IDENTIFYING = 64  # rows at the start that a fingerprint is made of


class PromptStream:
    """Prompts of an `IterableDataset`, by their running number in the run.

    Rows are shuffled within a buffer, anew in each epoch, by the seed. A resumed run reads the rows
    before its own again and leaves them out.

    Args:
        dataset: rows with a column `prompt`.
        encode: tokenizes the prompt of a row, given row and number; raises `TooLong` or ValueError.
        longest: most tokens of a prompt; longer ones are refused, or dropped.
        drop_long: drop longer prompts.
        seed, buffer_size: of the shuffling; a buffer of 0 keeps the order of the dataset.
    """

    size = None  # nobody knows

    def __init__(
        self,
        dataset: IterableDataset,
        encode: Callable[[Mapping[str, Any], int], list[int]],
        longest: int,
        drop_long: bool,
        seed: int,
        buffer_size: int,
    ) -> None:
        self.dataset = dataset.shuffle(seed, buffer_size=buffer_size) if buffer_size else dataset
        self.encode = encode
        self.longest = longest
        self.drop_long = drop_long
        self.name = "train_dataset" + (", rows in their shuffled order" if buffer_size else "")
        self._said: set[str] = set()
        self._restart()

    def _restart(self) -> None:
        self._kept: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self._next = 0  # number of the row that is read next
        self._rows = self._endless()

    def reach(self, last: int) -> None:
        """Read rows until that number is there; every process reads the same.

        Raises:
            ValueError: a row has no usable prompt.
        """
        while self._next <= last:
            self._kept[self._next] = next(self._rows)
            self._next += 1

    def forget_before(self, number: int) -> None:
        """Forget the rows before that number; they are read again if they are asked for."""
        for old in [one for one in self._kept if one < number]:
            del self._kept[old]

    def examples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by their numbers, with all columns."""
        return [dict(self._row(row)[0]) for row in rows]

    def encoded(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the tokens of the prompts of rows by their numbers."""
        return [self._row(row)[1] for row in rows]

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """Return all columns of rows; a row without one of them has None there."""
        examples = self.examples(rows)
        names = dict.fromkeys(name for example in examples for name in example)
        return {name: [example.get(name) for example in examples] for name in names}

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the first rows as they are drawn; a resumed run needs the same."""
        digest = hashlib.sha256(b"stream")
        for example, tokens in self._first():
            digest.update(f"{tokens}\n".encode())
            digest.update(json.dumps(example, sort_keys=True, default=repr).encode())
        return digest.hexdigest()

    @property
    def contents(self) -> None:
        """Nothing: a stream has no last row."""
        return None

    def _first(self) -> list[tuple[dict[str, Any], list[int]]]:
        rows = self._endless()
        return [next(rows) for _ in range(IDENTIFYING)]

    def _row(self, number: int) -> tuple[dict[str, Any], list[int]]:
        if number not in self._kept:
            if number < self._next:
                self._restart()
            self.reach(number)
        return self._kept[number]

    def _endless(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Yield rows with their tokens, epoch by epoch."""
        epoch = 0
        while True:
            self.dataset.set_epoch(epoch)
            count = number = 0
            for number, row in enumerate(self.dataset, start=1):
                tokens = self._tokens(row, number - 1)
                if tokens is not None:
                    count += 1
                    yield dict(row), tokens
            if count < number:
                self._warn_once(
                    f"dropped {number - count} of the stream's {number} prompts: too long"
                )
            if not count:
                raise ValueError(
                    "train_dataset: the stream has no prompts"
                    + (" of at most max_prompt_length tokens" if self.drop_long else "")
                )
            epoch += 1

    def _tokens(self, row: Mapping[str, Any], number: int) -> list[int] | None:
        try:
            if "prompt" not in row:
                raise ValueError(f"row {number} has no column 'prompt' (it has {', '.join(row)})")
            return self.encode(row, number)
        except TooLong as error:
            if self.drop_long:
                self._warn_once("prompts of the stream that are too long are dropped")
                return None
            raise ValueError(
                f"{self.name}: {error}. Raise max_prompt_length, or set long_prompts to drop"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)


class StreamOrder:
    """The order of a stream: a prompt index is the number of its row."""

    def rows(self, indices: Sequence[int]) -> list[int]:
        """Return the row of every prompt index."""
        return list(indices)
