"""Concurrent episodes of several turns, each of which continues as soon as it is answered."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.data.chat import TooLong, encode, encode_answer
from rlhf_pg.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.multi_turn.concurrent_calls import ConcurrentCalls
from rlhf_pg.rollout.multi_turn.environment import (
    Environment,
    EnvironmentFactory,
    Messages,
    Schemas,
    checked_observation,
    checked_prompt,
    checked_reward,
    settles,
)

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Episode:
    """One row: a prompt, the turns of the policy and the answers to them.

    Attributes:
        prompt: the prompt that it began with, or the dataset's if `reset` failed.
        prompt_ids: the tokens of the prompt.
        tokens: all later tokens, turns as they were sampled and answers as they were encoded.
        logprobs: one per token, 0 in an answer.
        actions: which tokens the policy chose.
        rewards: at the last token of each rewarded turn; NaN elsewhere.
        messages: the messages after the prompt, if it is chat.
        turns: the number of the policy's turns.
        truncated: whether a limit on tokens or turns cut it off.
        error: the error of its environment that ended it.
        environment: its own environment.
    """

    prompt: Messages
    prompt_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    actions: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    turns: int = 0
    truncated: bool = False
    error: str | None = None
    environment: Environment | None = None

    @property
    def trained(self) -> list[bool]:
        """The tokens that a loss or a statistic may use.

        There are none if the episode failed, since what they would have led to is not known.
        """
        return self.actions if self.error is None else [False] * len(self.actions)

    def act(self, completion: Completion, text: str) -> None:
        """Append a turn of the policy."""
        self._append(completion.tokens, completion.logprobs, own=True)
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1

    def observe(self, messages: Messages, tokens: Sequence[int]) -> None:
        """Append an answer of the environment."""
        self._append(tokens, [0.0] * len(tokens), own=False)
        if not isinstance(messages, str):
            self.messages += [dict(message) for message in messages]

    def pay(self, reward: float | None) -> None:
        """Reward the last turn."""
        if reward is not None:
            self.rewards[-1] = reward

    def cut_off(self) -> None:
        """Mark the episode as cut off by a limit.

        If it has no reward so far, it gets 0: "does not apply" would spare it the comparison with
        episodes that were completed.
        """
        self.truncated = True
        if all(math.isnan(reward) for reward in self.rewards):
            self.pay(0.0)

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], own: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.actions += [own] * len(tokens)
        self.rewards += [math.nan] * len(tokens)


@dataclass(kw_only=True)
class _Row:
    """An episode in progress."""

    episode: Episode
    example: Mapping[str, Any]
    tokens: Sequence[int]  # of the dataset's prompt
    prompt_index: int
    sample: int
    resetting: bool = True
    cut_off: bool = False  # whether the limit on tokens cut off its last turn
    stop_id: int | None = None  # the token that ended its last turn


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """A runner of episodes with the settings of the run.

    Attributes:
        environment_factory: makes the environment of one episode.
        tokenizer: of the policy.
        stop_token_ids: each of them ends a turn.
        max_turns: per episode; None for as many as its tokens allow.
        timeout: seconds for a `reset` or a `step`; None leaves it to the environment.
        tools: schemas of the functions that the chat template shows, or a function that returns
            those of a dataset row.
        special_tokens: keep them, except for the stop token, in the text that an environment reads.
        longest_prompt: tokens that a prompt may have; None for any number.
    """

    environment_factory: EnvironmentFactory
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    max_turns: int | None = None
    timeout: float | None = 60.0
    tools: Schemas | Callable[[Mapping[str, Any]], Schemas] = ()
    special_tokens: bool = False
    longest_prompt: int | None = None

    def tools_of(self, example: Mapping[str, Any]) -> Schemas:
        """Return the schemas that the chat template shows for a dataset row."""
        return self.tools(example) if callable(self.tools) else self.tools

    def play(
        self,
        engine: RolloutEngine,
        examples: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int]],
        prompt_indices: Sequence[int],
        n: int,
        params: SamplingParams,
        seed: int,
    ) -> list[Episode]:
        """Play `n` episodes of every example, in the order example * n + sample.

        Args:
            examples: dataset rows, with their `prompt`.
            tokens: of these prompts.
            prompt_indices: the prompt index of each, which keys its noise: the noise of a token
                depends only on (seed, prompt index, sample, its place after the prompt).
            params: `max_tokens` is for all turns and answers of an episode together.
        """
        rows = [
            _Row(
                episode=Episode(prompt=example["prompt"], prompt_ids=ids),
                example=example,
                tokens=ids,
                prompt_index=prompt_index,
                sample=sample,
            )
            for example, ids, prompt_index in zip(examples, tokens, prompt_indices, strict=True)
            for sample in range(n)
        ]
        episodes = [row.episode for row in rows]
        with (
            closing(episodes),
            ConcurrentCalls(self.timeout) as calls,
            engine.weights_synced(),
            engine.session(params, seed) as session,
        ):
            _EpisodeBatch(self, calls, session, params.max_tokens, rows).run()
        _warn(episodes)
        return episodes


@contextmanager
def closing(episodes: Sequence[Episode]) -> Iterator[None]:
    """Close the environments that want it, whatever happens inside."""
    try:
        yield
    finally:
        for episode in episodes:
            if settles(episode.environment):
                episode.environment.close()


def _warn(episodes: Sequence[Episode]) -> None:
    errors = [episode.error for episode in episodes if episode.error is not None]
    if errors:
        logger.warning(
            "%d of %d episodes failed; the first: %s", len(errors), len(episodes), errors[0]
        )


class _EpisodeBatch:
    """The episodes of one call of `EpisodeRunner.play`."""

    def __init__(
        self,
        runner: EpisodeRunner,
        calls: ConcurrentCalls,
        session: Session,
        max_tokens: int,
        rows: Sequence[_Row],
    ) -> None:
        self.runner, self.calls, self.session = runner, calls, session
        self.max_tokens = max_tokens
        self.groups: dict[int, dict[int, _Row]] = {}  # by prompt_index and sample
        for row in rows:
            self.groups.setdefault(row.prompt_index, {})[row.sample] = row
        # The row of each call, and the method that takes the result and says if a turn follows.
        self.waiting: dict[Future[Any], tuple[_Row, Callable[[_Row, Any], bool]]] = {}

    def run(self) -> None:
        for prompt_index, group in self.groups.items():
            for row in group.values():
                self._reset(row)
            self._start(prompt_index)  # does nothing while a reset is pending
        while self.waiting or not self.session.idle:
            finished = [] if self.session.idle else self.session.step()
            for request, sample, completion in finished:
                self._turn(self.groups[request.prompt_index][sample], completion)
            for future in self.calls.ended(wait=self.session.idle):
                self._returned(future)

    def _call(
        self,
        row: _Row,
        take: Callable[[_Row, Any], bool],
        function: Callable[..., Any],
        *arguments: Any,
    ) -> None:
        self.waiting[self.calls.start(function, *arguments)] = row, take

    def _returned(self, future: Future[Any]) -> None:
        row, take = self.waiting.pop(future)
        if future.cancelled():
            _fail(row, f"TimeoutError: no answer within {self.calls.timeout:g} s")
        elif (error := future.exception()) is not None:
            _fail(row, told(error))
        else:
            try:
                goes_on = take(row, future.result())
            except Exception as refused:  # the answer may be anything
                _fail(row, told(refused))
            else:
                if goes_on:
                    self._ask([row])
        if row.resetting:
            row.resetting = False
            self._start(row.prompt_index)

    # ---------------------------------------------------------------------------- the first turn

    def _reset(self, row: _Row) -> None:
        try:
            with foreign("environment_factory"):
                row.episode.environment = self.runner.environment_factory()
                reset = row.episode.environment.reset
        except Exception as error:
            _fail(row, told(error))
            row.resetting = False
            return
        self._call(row, self._prompted, reset, copy.deepcopy(dict(row.example)))

    def _prompted(self, row: _Row, prompt: Any) -> bool:
        prompt = checked_prompt(prompt, row.example["prompt"])
        if prompt != row.example["prompt"]:
            runner, tools = self.runner, self.runner.tools_of(row.example)
            ids = encode(prompt, runner.tokenizer, tools=tools, most=runner.longest_prompt)
            row.episode.prompt, row.episode.prompt_ids = prompt, ids
        return False

    def _start(self, prompt_index: int) -> None:
        """Ask for the first turns of a group once all of its episodes are reset.

        Rows with the same prompt share its computation.
        """
        group = self.groups[prompt_index].values()
        if any(row.resetting for row in group):
            return
        alike: dict[tuple[int, ...], list[_Row]] = {}
        for row in group:
            if row.episode.error is None:
                alike.setdefault(tuple(row.episode.prompt_ids), []).append(row)
        for rows in alike.values():
            self._ask(rows)

    # --------------------------------------------------------------------------------- every turn

    def _ask(self, rows: Sequence[_Row]) -> None:
        """Ask for the next turn of rows with the same tokens."""
        first = rows[0].episode
        position = len(first.tokens)
        request = Request(
            tokens=[*first.prompt_ids, *first.tokens],
            prompt_index=rows[0].prompt_index,
            samples=[row.sample for row in rows],
            position=position,
            max_tokens=self.max_tokens - position,
        )
        try:
            self.session.add(request)
        except ValueError as error:
            for row in rows:
                row.episode.error = f"ValueError: the episode {error}"
                if not position:  # a refused prompt must not reach the model
                    row.episode.prompt, row.episode.prompt_ids = row.example["prompt"], row.tokens

    def _turn(self, row: _Row, completion: Completion) -> None:
        ids, runner = completion.tokens, self.runner
        row.stop_id = ids[-1] if ids[-1] in runner.stop_token_ids else None
        row.cut_off = completion.finish_reason == "length"
        text = runner.tokenizer.decode(ids, skip_special_tokens=True)
        row.episode.act(completion, text)
        if runner.special_tokens:
            text = runner.tokenizer.decode(ids if row.stop_id is None else ids[:-1])
        assert row.episode.environment is not None
        self._call(row, self._observed, row.episode.environment.step, text)

    def _observed(self, row: _Row, answer: Any) -> bool:
        episode, runner = row.episode, self.runner
        messages, reward, done = checked_observation(answer, episode.prompt)
        episode.pay(reward)
        if row.cut_off or (not done and episode.turns == runner.max_turns):
            episode.cut_off()
        if done or episode.truncated:
            return self._over(row)
        room = self.max_tokens - len(episode.tokens) - 1  # for the answer, with one token after it
        tools = runner.tools_of(row.example)
        try:
            ids = encode_answer(
                messages, runner.tokenizer, episode.prompt, row.stop_id, tools, room
            )
        except TooLong:
            ids = None
        if ids is None or len(ids) > room:
            episode.cut_off()
            return self._over(row)
        episode.observe(messages, ids)
        return True

    # ------------------------------------------------------------------------------ after the last

    def _over(self, row: _Row) -> bool:
        """End an episode, whose environment may still have to say what it was worth."""
        environment = row.episode.environment
        if settles(environment):
            self._call(row, self._settled, environment.settle)
        return False

    def _settled(self, row: _Row, reward: Any) -> bool:
        row.episode.pay(checked_reward(reward, "an episode"))
        return False


def _fail(row: _Row, error: str) -> None:
    """End an episode by an error of its environment."""
    row.episode.error = error
