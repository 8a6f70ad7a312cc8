"""Helpers of ready-made rewards: texts, answers in them, optional packages."""

import importlib.util
import logging
import os
from functools import cache, lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlhf_pg.data import chat

logger = logging.getLogger(__name__)

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
BOXED = "\\boxed{"


class Unreadable(ValueError):
    """A reward cannot use the truth; the message says why."""


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    logger.warning("%s", text)


@cache
def require(module: str, extra: str) -> None:
    """Check that an optional package is installed, without importing it (else ValueError)."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'it needs {module}: pip install "rlhf-pg[{extra}]"')


def as_list(truth: Any) -> list[Any]:
    """Return right answers as a list; a truth may be one or a list."""
    if isinstance(truth, list | tuple):
        return list(truth)
    return [truth]


def cores_of_process() -> int:
    """Return this process's share of the cores of the machine."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def text_of(completion: Any) -> str:
    """Return the text of a completion; for a chat, the assistant's last message."""
    if isinstance(completion, str):
        return completion
    turns = [turn for turn in completion if turn.get("role", "assistant") == "assistant"]
    if turns:
        return chat.text_of(turns[-1])
    return ""


def answer_of(text: str) -> str:
    """Return the text after the last `</think>`, inside the last `<answer>`.

    Thinking that is not closed has no answer.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    _, opened, inside = text.rpartition("<answer>")
    if opened:
        return inside.partition("</answer>")[0]
    return text


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`; None if there is none, or it is not closed."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    start = start + len(BOXED)
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return None
