"""The answers of `vllm serve`; one that lacks something raises before it is used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.rollout.engine import Completion

LEAST = -9999.0  # vLLM's number for minus infinity


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A completion as it was requested."""

    max_tokens: int
    eos_token_ids: Sequence[int]  # each ends a completion
    by_string: bool  # a stop string, which may end with any token, can end it too

    def read(self, answer: Any) -> Completion:
        """Read the only choice of an answer.

        Raises:
            ValueError, LookupError, TypeError: something is missing or impossible.
        """
        [choice] = answer["choices"]
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [float(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
        if len(tokens) != len(logprobs) or not tokens:
            raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
        if len(tokens) > self.max_tokens:
            raise ValueError(f"{len(tokens)} tokens, and at most {self.max_tokens} were asked for")
        if min(logprobs) <= LEAST:
            raise ValueError(f"{min(logprobs)} is no log-probability of what was sampled")
        ended = [token in self.eos_token_ids for token in tokens]
        if any(ended[:-1]):
            raise ValueError(f"tokens after EOS, which is the one at {ended.index(True)}")
        ending: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
        fits = ended[-1] or self.by_string if reason == "stop" else not ended[-1]
        if reason == "length" and len(tokens) < self.max_tokens:
            raise ValueError(f"{len(tokens)} of {self.max_tokens} tokens, and no stop")
        if reason not in ("stop", "length") or not fits:
            raise ValueError(
                f"finish_reason {shown(reason)} with {shown(tokens[-1])} as the last token"
            )
        return Completion(tokens, logprobs, ending)


def models(answer: Any) -> list[str]:
    """Return the names of all models."""
    return [str(model["id"]) for model in answer["data"]]


def served(answer: Any) -> tuple[str, int]:
    """Return the first model, which is the server's own, and its longest sequence."""
    own = answer["data"][0]
    return str(own["id"]), int(own["max_model_len"])


def likeliest(answer: Any) -> float:
    """Return the log-probability of the likeliest token."""
    [token] = answer["choices"][0]["logprobs"]["top_logprobs"]
    return float(max(token.values()))


def success(answer: Any) -> bool:
    """Return whether the server succeeded."""
    return bool(answer["success"])


def on_cpu(answer: Any) -> bool:
    """Return whether the server computes on a CPU."""
    return "cpu" in str(answer["vllm_config"]["device_config"])
