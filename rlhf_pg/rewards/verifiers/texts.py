"""What the ready-made rewards look at: the text of a completion, the answer in it, the truths."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rlhf_pg.boundary.quoted import shown

logger = logging.getLogger(__name__)

Scores = list[float | None]
Seconds = Annotated[float, Field(gt=0)]
BOXED = "\\boxed{"


class Unreadable(ValueError):
    """An error for a truth that a reward cannot read, which says what it lacks."""


class Said(NamedTuple):
    """Completions, as a ready-made reward is given them."""

    reward: str  # its name
    completions: Sequence[Any]  # text or chat
    ids: Sequence[Sequence[int]] | None  # their tokens, if they are known
    columns: Mapping[str, Sequence[Any]]  # of the dataset, with one entry per completion
    # The prompt ends with `<think>`, as some chat templates have it, or with another tag: a
    # completion that was cut off before `</think>` is still thinking.
    opened: bool = False

    @property
    def texts(self) -> list[str]:
        """The whole text of each completion."""
        return list(map(text_of, self.completions))

    def truths(self, column: str) -> Sequence[Any]:
        """Return a column of the dataset.

        Raises:
            ValueError: there is none of this name, though there are completions.
        """
        if column not in self.columns and self.completions:
            there = ", ".join(map(repr, self.columns)) or "none"
            raise ValueError(
                f"reward {self.reward} finds no column {column!r} in the dataset (there: {there}): "
                "name the one with the truth by the option `column`"
            )
        return self.columns.get(column, ())

    def against(
        self,
        column: str,
        read: Callable[[Any], Any],
        judge: Callable[[list[str], list[Any]], Scores],
    ) -> Scores:
        """Compare the answers in completions with the truths in a column.

        Args:
            column: its name; where it holds None, the reward does not apply. A truth that cannot be
                read counts as None, with a warning.
            read: makes of a truth what `judge` takes, or raises `Unreadable`.
            judge: scores answers, with None where the truth turns out to be of no use.
        """
        scores: Scores = [None] * len(self.completions)
        given, truths = self.truths(column), {}
        for i, truth in enumerate(given):
            try:
                if truth is not None:
                    truths[i] = read(truth)
            except Unreadable as error:
                self.complain(column, truth, str(error))
        before = "<think>" * self.opened
        answers = [answer_of(before + text_of(self.completions[i])) for i in truths]
        for i, score in zip(truths, judge(answers, list(truths.values())), strict=True):
            scores[i] = score
            if score is None:
                self.complain(column, given[i], "it cannot be parsed")
        return scores

    def complain(self, column: str, truth: Any, why: str) -> None:
        """Warn of a truth that is of no use, once."""
        warn_once(
            f"reward {self.reward} does not apply where the column {column!r} holds "
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
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // beside)


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
