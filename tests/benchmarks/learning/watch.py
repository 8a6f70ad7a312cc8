"""What happens in a run: a clock that stops for evaluations, and a file of JSON lines."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TextIO

NGRAM = 8


class Watch:
    """The record of one run, and its clock, which stands still while the run is looked at.

    Args:
        reward: of the task; the run is given `self.reward` in its place.
        score: evaluates the weights as they are.
        every: steps from one evaluation to the next.
        file: what is seen goes there, a line at a time.
    """

    def __init__(
        self,
        reward: Callable[..., list[float]],
        score: Callable[[], float],
        every: int,
        file: TextIO,
    ) -> None:
        self._task_reward, self._score, self._every, self._file = reward, score, every, file
        self._heard: list[tuple[str, Sequence[int]]] = []
        self._repeats = Repeats()
        self._steps = self._samples = 0
        self._seconds = self._resumed = 0.0

    def reward(
        self, prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        """Score completions as the task does, and remember them until the step ends."""
        self._heard += zip(prompts, completion_ids, strict=True)
        return self._task_reward(prompts=prompts, completion_ids=completion_ids, **columns)

    def begin(self) -> None:
        """Evaluate the weights that the run starts from, and start the clock."""
        self._evaluate()
        self._resumed = time.perf_counter()

    def after_step(self, **numbers: float) -> None:
        """Write down a step, and evaluate if it is time; `numbers` are written as they are."""
        taken = time.perf_counter() - self._resumed
        self._seconds += taken
        self._steps += 1
        self._samples += len(self._heard)
        repeated = self._repeats.share(self._heard)
        tokens = sum(len(ids) for _, ids in self._heard)
        self._heard.clear()
        seen = {"step": self._steps, "samples": self._samples, "step_seconds": taken}
        self._write(seen | {"tokens": tokens, "repeated": repeated} | numbers)
        if self._every and self._steps % self._every == 0:
            self._evaluate()
        self._resumed = time.perf_counter()

    def _evaluate(self) -> None:
        score = self._score() if self._every else None
        self._write({"samples": self._samples, "seconds": self._seconds, "score": score})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


class Repeats:
    """What has been said to each prompt so far, in runs of `NGRAM` tokens."""

    def __init__(self) -> None:
        self._said: defaultdict[str, set[tuple[int | None, ...]]] = defaultdict(set)

    def share(self, completions: Sequence[tuple[str, Sequence[int]]]) -> float:
        """The share of tokens that repeat what an earlier step's completion of the prompt says.

        A token repeats if it and the 7 before it, or it and all before it where there are fewer,
        stand in such a completion in the same way.
        """
        runs = [(prompt, _runs(ids)) for prompt, ids in completions]
        known = sum(run in self._said[prompt] for prompt, own in runs for run in own)
        for prompt, own in runs:
            self._said[prompt].update(own)
        return known / max(1, sum(len(own) for _, own in runs))


def _runs(ids: Sequence[int]) -> list[tuple[int | None, ...]]:
    """For each token, it and the 7 before it; None stands for what is before the completion."""
    padded = [*[None] * (NGRAM - 1), *ids]
    return [tuple(padded[i : i + NGRAM]) for i in range(len(ids))]
