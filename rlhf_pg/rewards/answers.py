"""Answers of reward functions: the refusal of what is not a score, and the place of each score.

Shapes: B completions, T columns.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.boundary.user_code import finite
from rlhf_pg.boundary.worker import plain
from rlhf_pg.rewards.scores import ends


class CallFailed(Exception):
    """The failure of a call; its text continues the name of the function ("raised KeyError")."""


@dataclass(frozen=True)
class Failed:
    """The entry of a row for which a reward function has failed.

    Attributes:
        why: continues the name of the function.
        cause: the exception behind it.
    """

    why: str
    cause: BaseException | None = None


class Answer(NamedTuple):
    """The answer of a call: an entry per row, which is not checked yet, and what was logged."""

    scores: list[Any]
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]


def answered(call: Callable[[], Answer], count: int) -> Answer:
    """Return the answer of a call of `count` rows, all of which have failed if the call has."""
    try:
        return call()
    except CallFailed as error:
        return Answer([Failed(str(error), error.__cause__)] * count, {}, {})


class Unread:
    """An entry of an answer that another process could not read as a number, by its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def read(said: Any) -> Any:
    """Convert an answer to plain lists and numbers, as far as it can be."""
    said = plain(said)
    return [_listed(score) for score in said] if is_list(said) else said


def is_list(x: Any) -> bool:
    """Return whether a value is a sequence of scores."""
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def checked(name: str, scores: Any, count: int) -> list[Any]:
    """Return an answer that is a list with one entry per completion.

    Raises:
        ValueError: it is not.
    """
    if not is_list(scores) or len(scores) != count:
        got = f"{len(scores)} scores" if is_list(scores) else shown(scores)
        raise ValueError(
            f"reward function {name} must return a list of {count} scores, one per completion, "
            f"got {got}"
        )
    return list(scores)


def placed(
    name: str,
    scores: Sequence[Any],
    rows: Sequence[int],
    completion_ids: Sequence[Sequence[int]],
    mask: Tensor,
) -> Tensor:
    """Return (B,T) scores of these rows by one function, each at its token; NaN elsewhere.

    Raises:
        ValueError: an entry is not a finite number, nor a list with one per token.
    """
    table = torch.full(mask.shape, math.nan, dtype=torch.float64)
    last = ends(mask).tolist()
    for i, score in zip(rows, scores, strict=True):
        if is_list(score):
            own = mask[i, : len(completion_ids[i])].tolist()
            steps = _steps(name, i, score, own)
            table[i, : len(own)] = torch.tensor(steps, dtype=torch.float64)
        else:
            table[i, last[i]] = _number(name, f"completion {i}", score)
    return table


def refusal(name: str, completion: int, score: Any, own: Sequence[bool]) -> str | None:
    """Return why a completion's score would be refused by `placed`, or None."""
    try:
        if is_list(score):
            _steps(name, completion, score, own)
        else:
            _number(name, f"completion {completion}", score)
    except ValueError as error:
        return str(error)
    return None


def _listed(score: Any) -> Any:
    """Convert scores of steps to a list; a single number stays as it is."""
    steps = plain(score)
    return steps if is_list(steps) else score


def _steps(name: str, completion: int, scores: Sequence[Any], own: Sequence[bool]) -> list[float]:
    """Return one number per token, NaN for None; `own` says which tokens the policy chose."""
    if len(scores) != len(own):
        raise ValueError(
            f"reward function {name} returned a list of {len(scores)} scores for completion "
            f"{completion} of the batch, which has {len(own)} tokens: return one entry per token, "
            "None where no step ends"
        )
    where = [f"token {t} of completion {completion}" for t in range(len(own))]
    numbers = [_number(name, at, score) for at, score in zip(where, scores, strict=True)]
    for at, number, chosen in zip(where, numbers, own, strict=True):
        if not chosen and not math.isnan(number):
            raise ValueError(
                f"reward function {name} returned {number} for {at} of the batch, which the policy "
                "did not choose: score the last token of its own before that one"
            )
    return numbers


def _number(name: str, where: str, score: Any) -> float:
    if score is None:
        return math.nan
    if (number := finite(score)) is None:
        raise ValueError(
            f"reward function {name} returned {shown(score)} for {where} of the batch: return a "
            "finite number, or None where the reward does not apply"
        )
    return number
