"""Questions of a step to others, and their answers, kept so that the step can be made again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_pg.boundary.quoted import quoted

EPISODE = "episode"  # the source of the answers of an environment
Answer = Mapping[str, Any]  # in JSON types


class Outside:
    """The questions of one step, or of its repetition, to whatever is no function of the run alone.

    An answer is known by its source, the number of the call within the step, the prompt's index and
    the number of the sample, which do not depend on the number of processes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, recorded: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Forget what was noted, for another step.

        Args:
            recorded: what `lines` returned when the step was first made; it is answered from these.
        """
        self._noted: list[dict[str, Any]] = []
        self._calls: Counter[str] = Counter()
        self._known: dict[tuple[Any, ...], Answer] | None = None
        if recorded is not None:
            self._known = {
                (line["source"], line["call"], line["prompt_index"], line["sample"]): line["answer"]
                for line in recorded
            }

    @property
    def is_recorded(self) -> bool:
        """True if the step is made again, and nobody is to be asked."""
        return self._known is not None

    def next_call(self, source: str) -> int:
        """Number a call of a source, which is about several completions."""
        self._calls[source] += 1
        return self._calls[source] - 1

    def note(self, source: str, call: int, prompt_index: int, sample: int, answer: Answer) -> None:
        """Keep an answer about a completion."""
        where = {"source": source, "call": call, "prompt_index": prompt_index, "sample": sample}
        self._noted.append({**where, "answer": answer})

    def answer(self, source: str, call: int, prompt_index: int, sample: int) -> Answer:
        """Return the answer that was kept.

        Raises:
            ValueError: there is none.
        """
        known = self._known or {}
        if (answer := known.get((source, call, prompt_index, sample))) is None:
            raise ValueError(
                f"outside.jsonl has no answer of {quoted(source)} about sample {sample} of prompt "
                f"{prompt_index}: the step cannot be made again"
            )
        return answer

    def lines(self) -> list[dict[str, Any]]:
        """Return what was noted, for outside.jsonl."""
        return self._noted
