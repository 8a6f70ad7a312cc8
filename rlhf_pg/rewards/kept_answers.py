"""Answers of reward functions in `outside.jsonl`, and back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.outside import Outside
from rlhf_pg.boundary.user_code import finite
from rlhf_pg.boundary.worker import safe_text
from rlhf_pg.rewards.answers import Unread, is_list
from rlhf_pg.rewards.blame import Answer, Failed

Keys = Sequence[tuple[int, int]]  # the prompt's index and the number of the sample, by row


def keep(outside: Outside, source: str, answer: Answer, keys: Keys) -> None:
    """Keep what a source said of some rows; what it logged of all together is with the first."""
    call = outside.next_call(source)
    for i, (prompt_index, sample) in enumerate(keys):
        said: dict[str, Any] = {"score": _plain(answer.scores[i])}
        if answer.extra:
            said["extra"] = {name: values[i] for name, values in answer.extra.items()}
        if answer.metrics and i == 0:
            said["metrics"] = answer.metrics
        outside.note(source, call, prompt_index, sample, said)


def kept(outside: Outside, source: str, keys: Keys) -> Answer:
    """Return what a source said of these rows.

    Raises:
        ValueError: it was not asked about one of them.
    """
    call = outside.next_call(source)
    said = [outside.answer(source, call, *key) for key in keys]
    names = dict.fromkeys(name for one in said for name in one.get("extra", {}))
    metrics: dict[str, list[float]] = {}
    for one in said:
        for name, numbers in one.get("metrics", {}).items():
            known = [math.nan if number is None else number for number in numbers]
            metrics.setdefault(name, []).extend(known)
    return Answer(
        [_entry(one["score"]) for one in said],
        {name: [one.get("extra", {}).get(name) for one in said] for name in names},
        metrics,
    )


def _plain(score: Any) -> Any:
    """Return a score as JSON has it, what is none by its text."""
    if isinstance(score, Failed):
        return {"failed": score.why, "alone": score.alone}
    if is_list(score):
        return [_plain(step) for step in score]
    number = None if score is None else finite(score)
    return {"unread": safe_text(score)} if number is None and score is not None else number


def _entry(score: Any) -> Any:
    if is_list(score):
        return [_entry(step) for step in score]
    if not isinstance(score, Mapping):
        return score
    if "unread" in score:
        return Unread(str(score["unread"]))
    return Failed(str(score["failed"]), alone=bool(score["alone"]))
