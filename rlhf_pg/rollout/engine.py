"""The interface of the rollout engines: token ids in, token ids out."""

import math
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

MOMENT = 0.05  # seconds that a step waits for an answer of another process


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters, with vLLM's names; ValueError if a number is out of range."""

    temperature: float = 1.0  # divides the logits; 0: greedy, log-probabilities at temperature 1
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens whose mass reaches this
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    max_tokens: int = 256  # longest completion, EOS included
    stop: str | Sequence[str] | None = None  # strings that end a completion; they stay in it

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
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


@dataclass(frozen=True)
class Completion:
    """One sampled completion; FloatingPointError if a log-probability is NaN."""

    tokens: list[int]  # sampled ids, including the EOS that ended the row
    logprobs: list[float]  # under the distribution that each token was drawn from
    finish_reason: Literal["stop", "length"]  # stop: EOS or a stop string, even at the limit

    def __post_init__(self) -> None:
        if any(map(math.isnan, self.logprobs)):
            raise FloatingPointError(
                "the model's logits are NaN: its weights have diverged, or the model returns "
                "NaN for padding in this dtype"
            )


class RolloutError(RuntimeError):
    """The engine cannot sample any more, for example because it lost its server."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence of tokens to continue, once per sample; ValueError if max_tokens is below 1."""

    tokens: Sequence[int]  # the prompt, or a whole episode so far
    prompt_index: int  # the running number of the prompt; seeds the noise
    samples: Sequence[int] = (0,)  # sample numbers, one per continuation; seed the noise too
    position: int = 0  # of the first new token, counted from the end of the prompt
    max_tokens: int | None = None  # a limit below that of the `SamplingParams`
    stop: Sequence[str] = ()  # strings that end it, beside those of the `SamplingParams`
    cancelled: Callable[[], bool] = bool  # whether no more tokens are needed; `bool()` is False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")

    def limit(self, params: SamplingParams, longest: int | None = None, what: str = "") -> int:
        """Return the most tokens of each continuation; ValueError if the prompt is empty, or with
        them exceeds `longest`, the limit on a sequence that `what` names.
        """
        most = min(self.max_tokens or params.max_tokens, params.max_tokens)
        if not len(self.tokens):
            raise ValueError("is empty: a model needs at least one token to continue")
        if longest and len(self.tokens) + most > longest:
            raise ValueError(
                f"has {len(self.tokens)} tokens; with max_tokens {most} that exceeds {what} of "
                f"{longest}"
            )
        return most


class Finished(NamedTuple):
    """A completion with its request and sample number."""

    request: Request
    sample: int
    completion: Completion


class Session(Protocol):
    """Requests that are sampled together, each entering and leaving at its own time."""

    def add(self, request: Request) -> None:
        """Request completions; ValueError if that is not possible. The caller puts the name of the
        prompt before the message ("is empty: ...").
        """

    def step(self) -> list[Finished]:
        """Sample for a moment, and return the completions that have finished, often none."""

    @property
    def idle(self) -> bool:
        """True if every requested completion has been returned."""


Copied = Callable[[], AbstractContextManager[None]]  # weights; the block samples from them


class FutureSession(ABC):
    """The base of sessions whose completions are sampled elsewhere."""

    def __init__(self) -> None:
        self._asked: dict[Future[Any], Any] = {}  # each with what it was asked
        self._answers: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def wait_for(self, future: "Future[Any]", asked: Any) -> None:
        """Have `step` read the result of a future."""
        self._asked[future] = asked
        future.add_done_callback(self._answers.put)

    @abstractmethod
    def read(self, future: "Future[Any]", asked: Any) -> list[Finished]:
        """Return the completions of a future that is done."""

    def step(self) -> list[Finished]:
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._answers.get(timeout=MOMENT))
            while True:
                arrived.append(self._answers.get_nowait())
        finished = []
        for future in arrived:
            if future in self._asked:  # else it has been asked elsewhere
                finished += self.read(future, self._asked.pop(future))
        return finished

    @property
    def idle(self) -> bool:
        return not self._asked

    def close(self) -> None:
        """Cancel the requests under way."""
        for future in self._asked:
            future.cancel()


class RolloutEngine(ABC):
    """The base class of all engines that sample completions."""

    is_synced = False
    gathers: str = "all"  # the weights that it needs whole: "all", "trained" or "none"

    @abstractmethod
    def session(self, params: SamplingParams, seed: int) -> AbstractContextManager[Session]:
        """Open a session for sampling, inside `weights_synced`.

        Samples depend only on the model, the request's tokens and (seed, prompt index, sample,
        position).
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample `n` completions of every prompt, in the order prompt * n + sample (`stream`), from
        the weights of the enclosing `weights_synced`, or without one from the current weights.
        """
        with nullcontext() if self.is_synced else self.weights_synced():
            completions = dict(self.stream(prompts, n, params, seed, prompt_ids))
        return [completions[number] for number in range(len(prompts) * n)]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> Generator[tuple[int, Completion]]:
        """Yield each completion as soon as it is finished, with its place, prompt * n + sample;
        inside `weights_synced`.

        A caller that stops early must close the generator, which holds a session open.

        `prompt_ids` has the prompt index of each prompt, by default its place in the list.
        ValueError if n is below 1, or a prompt is empty or too long.
        """
        indices = range(len(prompts)) if prompt_ids is None else prompt_ids
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if len(indices) != len(prompts):
            raise ValueError(f"prompt_ids has {len(indices)} entries for {len(prompts)} prompts")
        requests = [
            Request(tokens=tokens, prompt_index=index, samples=range(n))
            for tokens, index in zip(prompts, indices, strict=True)
        ]
        numbers = {id(request): i for i, request in enumerate(requests)}
        with self.session(params, seed) as session:
            for i, request in enumerate(requests):
                try:
                    session.add(request)
                except ValueError as error:
                    raise ValueError(f"prompt {i} {error}") from error
            while not session.idle:
                for request, sample, completion in session.step():
                    yield numbers[id(request)] * n + sample, completion

    @contextmanager
    def weights_synced(self, copied: "Copied | None" = None) -> Iterator[None]:
        """Inside the block, sample from the weights as they are now, or from those that
        `copy_weights` has copied. RuntimeError inside another such block.
        """
        if self.is_synced:
            raise RuntimeError("the engine is sampling already, perhaps from other weights")
        load = copied or self._load_weights
        self.is_synced = True
        try:
            with load():
                yield
        finally:
            self.is_synced = False

    def check_synced(self) -> None:
        """Refuse to sample from weights that may be outdated (RuntimeError)."""
        if not self.is_synced:
            raise RuntimeError("the engine has not got the weights: sample inside weights_synced()")

    def _load_weights(self) -> AbstractContextManager[None]:
        """Take over the policy's weights, and on exit free what only sampling needs."""
        return nullcontext()

    def copy_weights(self) -> "Copied":
        """Copy the policy's weights now, for a later `weights_synced`, perhaps in another thread;
        only in engines that sample beside the trainer.
        """
        raise NotImplementedError

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Let all processes use the same servers, once the weights are there; collective."""
        return
