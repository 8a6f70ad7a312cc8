"""Base classes of the ready-made rewards: options, the text looked at, the column of truths."""

import importlib.util
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.config.fields import config

logger = logging.getLogger(__name__)

Scores = list[float | None]
BOXED = "\\boxed{"


class Unreadable(ValueError):
    """An error for a truth that a verifier cannot read, which says what it lacks."""


@config
class Verifier(ABC):
    """A reward function made of options, which can be pickled and sent to another process."""

    kind: ClassVar[str]

    @property
    def __name__(self) -> str:
        """The name in metrics, which is the one in `VERIFIERS`."""
        return self.kind

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Sequence[Any],
    ) -> Scores:
        """Return one score per completion.

        Args:
            prompts: not looked at.
            completions: strings, or chats, of which the last words of the assistant count.
            completion_ids: token ids of each completion, for what counts tokens.
            columns: the other columns of the dataset, with one entry per completion.

        Returns:
            One score per completion; None where the reward does not apply.

        Raises:
            ValueError: a column is missing, or there are no token ids to count.
        """
        return self.scores([text_of(said) for said in completions], completion_ids, columns)

    @abstractmethod
    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Return one score per text."""

    def truths(self, column: str, columns: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
        """Return a column of the dataset.

        Raises:
            ValueError: there is none of this name.
        """
        if column not in columns:
            there = ", ".join(map(repr, columns)) or "none"
            raise ValueError(
                f"reward {self.kind} finds no column {column!r} in the dataset (there: {there}): "
                "name the one with the truth by the option `column`"
            )
        return columns[column]


@config
class TruthVerifier(Verifier):
    """A verifier that compares the answer in a completion with the truth in a column.

    Args:
        column: name of the column; where it holds None, the reward does not apply. A truth that
            cannot be read counts as None, with a warning.
        opened: the prompt ends with `<think>`, as some chat templates have it.
    """

    column: str = "answer"
    opened: bool = False

    def answers(self, texts: Sequence[str]) -> list[str]:
        """Return the answer in each completion; see `answer_of`."""
        return [answer_of(f"<think>{text}" if self.opened else text) for text in texts]

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        given = self.truths(self.column, columns)
        truths = [self._readable(truth) for truth in given]
        rows = [i for i, truth in enumerate(truths) if truth is not None]
        judged = self.judge(self.answers([texts[i] for i in rows]), [truths[i] for i in rows])
        by_row = dict(zip(rows, judged, strict=True))
        for i, score in by_row.items():
            if score is None:
                warn_once(self._complaint(given[i], "it cannot be parsed"))
        return [by_row.get(i) for i in range(len(texts))]

    @abstractmethod
    def read(self, truth: Any) -> Any:
        """Return a truth as `judge` takes it.

        Raises:
            Unreadable: it is of no use.
        """

    @abstractmethod
    def judge(self, answers: Sequence[str], truths: Sequence[Any]) -> Scores:
        """Return one score per answer; None where the truth turns out to be of no use."""

    def _readable(self, truth: Any) -> Any:
        try:
            return None if truth is None else self.read(truth)
        except Unreadable as error:
            warn_once(self._complaint(truth, str(error)))
            return None

    def _complaint(self, truth: Any, why: str) -> str:
        return (
            f"reward {self.kind} does not apply where the column {self.column!r} holds "
            f"{shown(truth)}: {why}"
        )


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Log a warning, the first time only."""
    logger.warning("%s", text)


def require(module: str, extra: str) -> None:
    """Refuse to go on without an optional package, which is not imported yet.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'it needs {module}: pip install "rlhf-pg[{extra}]"')


def several(truth: Any) -> list[Any]:
    """Return right answers as a list, since a truth may be one or a list of them."""
    return list(truth) if isinstance(truth, list | tuple) else [truth]


def share_of_cores() -> int:
    """Return how many cores this process may keep busy beside the others of its run."""
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // max(1, int(beside) if beside.isdecimal() else 1))


# ------------------------------------------------------------------------------ parts of a text


def text_of(completion: Any) -> str:
    """Return the text of a completion, of a chat what the assistant said last."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role") == "assistant"]
    content = said[-1].get("content") if said else None
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [])


def answer_of(text: str) -> str:
    """Return what is not thinking: behind the last `</think>`, inside the last `<answer>`.

    Thinking that was begun and not ended has no answer yet.
    """
    before, ended, after = text.rpartition("</think>")
    text = after if ended else before + after
    text = text.partition("<think>")[0]
    _, opened, inside = text.rpartition("<answer>")
    return inside.partition("</answer>")[0] if opened else text


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{}` holds; None if there is none, or if it is left open."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth, start = 1, start + len(BOXED)
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return None
