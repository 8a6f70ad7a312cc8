"""What the ready-made rewards share: the text that is looked at, the answer in it, the truths."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlhf_pg.boundary.quoted import shown

logger = logging.getLogger(__name__)

Scores = list[float | None]
Columns = Mapping[str, Sequence[Any]]  # of the dataset, with one entry per completion
Seconds = Annotated[float, Field(gt=0)]
BOXED = "\\boxed{"


class Unreadable(ValueError):
    """An error for a truth that a reward cannot read, which says what it lacks."""


def against_truths(
    name: str,
    completions: Sequence[Any],
    columns: Columns,
    column: str,
    opened: bool,
    read: Callable[[Any], Any],
    judge: Callable[[list[str], list[Any]], Scores],
) -> Scores:
    """Compare the answers in completions with the truths in a column.

    Args:
        column: its name; where it holds None, the reward does not apply. A truth that cannot be
            read counts as None, with a warning.
        opened: the prompt ends with `<think>`, as some chat templates have it.
        read: makes of a truth what `judge` takes, or raises `Unreadable`.
        judge: scores answers, with None where the truth turns out to be of no use.

    Raises:
        ValueError: there is no such column.
    """

    def complain(truth: Any, why: str) -> None:
        warn_once(
            f"reward {name} does not apply where the column {column!r} holds {shown(truth)}: {why}"
        )

    def readable(truth: Any) -> Any:
        try:
            return None if truth is None else read(truth)
        except Unreadable as error:
            complain(truth, str(error))
            return None

    given = truths_in(name, completions, columns, column)
    truths = [readable(truth) for truth in given]
    rows = [i for i, truth in enumerate(truths) if truth is not None]
    before = "<think>" if opened else ""
    answers = [answer_of(before + text_of(completions[i])) for i in rows]
    scores: Scores = [None] * len(completions)
    for i, score in zip(rows, judge(answers, [truths[i] for i in rows]), strict=True):
        scores[i] = score
        if score is None:
            complain(given[i], "it cannot be parsed")
    return scores


def truths_in(
    name: str, completions: Sequence[Any], columns: Columns, column: str
) -> Sequence[Any]:
    """Return a column of the dataset.

    Raises:
        ValueError: there is none of this name, though there are completions.
    """
    if column not in columns and completions:
        there = ", ".join(map(repr, columns)) or "none"
        raise ValueError(
            f"reward {name} finds no column {column!r} in the dataset (there: {there}): name the "
            "one with the truth by the option `column`"
        )
    return columns.get(column, ())


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
