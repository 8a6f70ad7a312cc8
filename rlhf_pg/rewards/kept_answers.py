"""Answers of reward functions in `outside.jsonl`, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.outside import Outside
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
            metrics.setdefault(name, []).extend(numbers)
    return Answer(
        [_entry(one["score"]) for one in said],
        {name: [one.get("extra", {}).get(name) for one in said] for name in names},
        metrics,
    )


def _plain(score: Any) -> Any:
    return {"failed": score.why, "alone": score.alone} if isinstance(score, Failed) else score


def _entry(score: Any) -> Any:
    if isinstance(score, Mapping):
        return Failed(str(score["failed"]), alone=bool(score["alone"]))
    return score
