"""The judgement of a batch: what the sources of reward said, put together from their calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlhf_pg.boundary.quoted import shown as quote
from rlhf_pg.rewards.answers import Answer, Failed
from rlhf_pg.rewards.calls import Pending
from rlhf_pg.rewards.sources import Source

Begun = dict[int, Pending]  # calls on the completions of one prompt, by the number of the source


@dataclass(kw_only=True)
class Judgement:
    """Scores of a batch, with what the functions logged and where they failed.

    Attributes:
        scores: (B,T,K), see `Rewards.__call__`.
        lost: (B,) True where sources failed and no other gave a score.
        extra: columns for completions.jsonl, of B values each.
        metrics: numbers for metrics.jsonl, one per call.
        called, failed: completions that each function was asked about, and failed on.
        first_failure: the error of the first of these.
    """

    scores: Tensor
    lost: Tensor
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    called: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    first_failure: str | None = None

    def note(self, answer: Answer, rows: Sequence[int]) -> None:
        """Take in what a source has logged of these rows."""
        _take_in(answer, rows, len(self.lost), self.extra, self.metrics)


def joined(
    answers: Mapping[int, Answer], places: Mapping[int, Sequence[int]], count: int
) -> Answer:
    """Return the answers of a source about every prompt as one about all completions."""
    scores: list[Any] = [None] * count
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    for group, rows in places.items():
        answer = answers[group]
        for place, score in zip(rows, answer.scores, strict=True):
            scores[place] = score
        _take_in(answer, rows, count, extra, metrics)
    return Answer(scores, extra, metrics)


def _take_in(
    answer: Answer,
    rows: Sequence[int],
    count: int,
    extra: dict[str, list[Any]],
    metrics: dict[str, list[float]],
) -> None:
    """Add what an answer logged of some of `count` rows to the columns and numbers of all."""
    for name, values in answer.extra.items():
        column = extra.setdefault(name, [None] * count)
        for row, value in zip(rows, values, strict=True):
            column[row] = value
    for name, numbers in answer.metrics.items():
        metrics.setdefault(name, []).extend(numbers)


def described(source: Source, failed: Failed, row: int, prompt: Any) -> str:
    """Describe a failure with its function, and where calls are of one prompt, with that."""
    everything = f"{source.who} {failed.why}"
    if source.place == "trainer":
        return everything
    return f"{everything}, for the call with completion {row} of the batch, prompt {quote(prompt)}"
