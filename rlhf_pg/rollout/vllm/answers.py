"""The answers of `vllm serve`, checked so that anything malformed raises before it is used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.rollout.engine import Completion

LEAST = -9999.0  # vLLM's number for minus infinity
ROUNDING = 1e-3  # the most by which rounding may lift a log-probability above 0


class Served(NamedTuple):
    """The model that a server serves."""

    name: str
    max_model_length: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A completion as it was requested.

    Attributes:
        max_tokens: the most tokens.
        vocab_size: ids are below it.
        eos_token_ids: each ends a completion.
        by_string: whether a stop string, which may end with any token, can end it too.
    """

    max_tokens: int
    vocab_size: int
    eos_token_ids: Sequence[int]
    by_string: bool

    def read(self, answer: Any) -> Completion:
        """Read the only choice of an answer.

        Raises:
            ValueError, LookupError, TypeError: something is missing or impossible.
        """
        [choice] = answer["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(tokens) != len(logprobs) or not tokens:
            raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
        if len(tokens) > self.max_tokens:
            raise ValueError(f"{len(tokens)} tokens, and at most {self.max_tokens} were asked for")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(f"{shown(token)} is no token of a vocabulary of {self.vocab_size}")
        for logprob in logprobs:
            if not _is_number(logprob) or not LEAST < logprob <= ROUNDING:
                raise ValueError(f"{shown(logprob)} is no log-probability of what was sampled")
        reason = self._ending(tokens, choice["finish_reason"])
        return Completion(tokens, [float(logprob) for logprob in logprobs], reason)

    def _ending(self, tokens: Sequence[int], reason: Any) -> Literal["stop", "length"]:
        ended = [token in self.eos_token_ids for token in tokens]
        if any(ended[:-1]):
            raise ValueError(f"tokens after EOS, which is the one at {ended.index(True)}")
        if reason == "stop" and (ended[-1] or self.by_string):
            return "stop"
        if reason == "length" and len(tokens) < self.max_tokens:
            raise ValueError(f"{len(tokens)} of {self.max_tokens} tokens, and no stop")
        if reason == "length" and not ended[-1]:
            return "length"
        raise ValueError(
            f"finish_reason {shown(reason)} with {shown(tokens[-1])} as the last token"
        )


def models(answer: Any) -> list[str]:
    """Return the names of all models."""
    return [_name(model["id"]) for model in answer["data"]]


def served(answer: Any) -> Served:
    """Return the first model, which is the server's own."""
    own = answer["data"][0]
    length = own["max_model_len"]
    if type(length) is not int or length < 1:
        raise ValueError(f"max_model_len is {shown(length)}")
    return Served(_name(own["id"]), length)


def likeliest(answer: Any) -> float:
    """Return the log-probability of the likeliest token."""
    [token] = answer["choices"][0]["logprobs"]["top_logprobs"]
    logprob = max(token.values())
    if not _is_number(logprob) or not math.isfinite(logprob):
        raise ValueError(f"{shown(logprob)} is no log-probability")
    return float(logprob)


def success(answer: Any) -> bool:
    """Return whether the server succeeded."""
    done = answer["success"]
    if type(done) is not bool:
        raise ValueError(f"success is {shown(done)}")
    return done


def on_cpu(answer: Any) -> bool:
    """Return whether the server computes on a CPU."""
    return "cpu" in str(answer["vllm_config"]["device_config"])


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"the id of a model is {shown(name)}")
    return name


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
