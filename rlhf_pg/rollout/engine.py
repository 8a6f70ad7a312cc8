"""What every rollout engine takes and gives: token ids in, token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; the names and meanings of vLLM.

    Attributes:
        temperature: divides the logits; 0 is greedy, with log-probabilities at temperature 1.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        max_tokens: longest completion, EOS included.
        stop: strings that end a completion; their tokens stay in it.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (fits, wanted) in ranges.items():
            if not fits:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)}")
        if "" in self.stop_strings:
            raise ValueError("stop holds an empty string, which would end every completion at once")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: sampled ids, the EOS that ended the row included.
        logprobs: one per token, under the distribution that it was really drawn from.
        finish_reason: "stop" if an EOS id or a stop string ended it, even as the last allowed
            token; otherwise "length".
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """Anything that can sample."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample `n` completions of every prompt, in the order prompt * n + sample.

        Args:
            prompts: token ids.
            prompt_ids: the number that keys each prompt's noise, by default its place in the list.
                What is sampled depends on (seed, prompt id, sample, position) and the model alone.
        """
        ...
