"""The search for the rows on which a call of a reward function fails."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_pg.rewards.answers import CallFailed

MOST_BLAMED = 3  # rows that are found by calls of their own; each may take the whole time


@dataclass(frozen=True)
class Failed:
    """The entry of a row for which a reward function has failed.

    Attributes:
        why: continues the name of the function.
        alone: the call was of this row alone.
        cause: the exception behind it.
    """

    why: str
    alone: bool = False
    cause: BaseException | None = None


class Answer(NamedTuple):
    """The answer of a call: an entry per row, which is not checked yet, and what was logged."""

    scores: list[Any]
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]


def settled(
    attempt: Callable[[Sequence[int]], Answer],
    count: int,
    *,
    blames: bool = True,
    stops: bool = False,
    most: int = MOST_BLAMED,
) -> Answer:
    """Score rows in one call; if it fails, find the rows to blame, and score the others together.

    A function may compare the completions of a prompt, so the scores of rows that were called alone
    are not used.

    Args:
        attempt: calls the function on some of the rows.
        blames: look for rows to blame; or else all of them have failed.
        stops: the run stops for the first of them, so that no other is looked for.
        most: once so many are found, all that are left have failed too.
    """
    everyone = list(range(count))
    try:
        return attempt(everyone)
    except CallFailed as error:
        whole = Failed(str(error), alone=count == 1, cause=error.__cause__)
    if not blames or count == 1:
        return Answer([whole] * count, {}, {})
    failed = _blamed(attempt, everyone, 1 if stops else most)
    if stops:
        return Answer([failed.get(i, None if failed else whole) for i in everyone], {}, {})
    rest = [i for i in everyone if i not in failed]
    try:
        return _spread(attempt(rest), rest, failed, count) if rest else _nothing(failed)
    except CallFailed as error:
        again = Failed(str(error), cause=error.__cause__)
        return _nothing({i: failed.get(i, again) for i in everyone})


def _blamed(
    attempt: Callable[[Sequence[int]], Answer], rows: Sequence[int], most: int
) -> dict[int, Failed]:
    """Call the function on one row at a time; once `most` have failed, the rest has failed too."""
    failed: dict[int, Failed] = {}
    for i in rows:
        try:
            attempt([i])
        except CallFailed as error:
            failed[i] = Failed(str(error), alone=True, cause=error.__cause__)
        if len(failed) == most:
            left = Failed(f"was not called again, since {most} others failed")
            return failed | ({} if most == 1 else dict.fromkeys(range(i + 1, len(rows)), left))
    return failed


def _nothing(failed: Mapping[int, Failed]) -> Answer:
    return Answer([failed[i] for i in sorted(failed)], {}, {})


def _spread(
    answer: Answer, rest: Sequence[int], failed: Mapping[int, Failed], count: int
) -> Answer:
    """Return an answer for some rows as one for all; what was logged has None elsewhere."""
    scores = dict(failed) | dict(zip(rest, answer.scores, strict=True))
    extra: dict[str, list[Any]] = {}
    for name, values in answer.extra.items():
        there = dict(zip(rest, values, strict=True))
        extra[name] = [there.get(i) for i in range(count)]
    return Answer([scores[i] for i in range(count)], extra, answer.metrics)
