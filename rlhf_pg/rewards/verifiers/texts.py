"""The parts that ready-made rewards share: texts, answers in them, optional packages."""

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
    """An error for a truth that a reward cannot use, which says what it lacks."""


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Log a warning, the first time only."""
    logger.warning("%s", text)


@cache
def require(module: str, extra: str) -> None:
    """Refuse to go on without an optional package, which is not imported yet (ValueError)."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'it needs {module}: pip install "rlhf-pg[{extra}]"')


def as_list(truth: Any) -> list[Any]:
    """Return right answers as a list, since a truth may be one or a list of them."""
    return list(truth) if isinstance(truth, list | tuple) else [truth]


def cores_of_process() -> int:
    """Return how many cores this process may keep busy beside the others of its run."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // processes)


def text_of(completion: Any) -> str:
    """Return the text of a completion, of a chat what the assistant said last."""
    if isinstance(completion, str):
        return completion
    turns = [message for message in completion if message.get("role") == "assistant"]
    return chat.text_of(turns[-1]) if turns else ""


def answer_of(text: str) -> str:
    """Return what is not thinking: behind the last `</think>`, inside the last `<answer>`.

    Thinking that was begun and not ended has no answer yet.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
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
