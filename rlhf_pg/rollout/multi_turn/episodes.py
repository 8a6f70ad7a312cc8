"""Concurrent episodes of several turns, each of which continues as soon as it is answered."""

import copy
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_code import call_beside, foreign
from rlhf_pg.data.chat import encode, encode_answer
from rlhf_pg.data.prompts import Tools
from rlhf_pg.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.multi_turn.environment import (
    Environment,
    EnvironmentFactory,
    Messages,
    SettlingEnvironment,
    check_observation,
    check_prompt,
    check_reward,
)
from rlhf_pg.rollout.multi_turn.tools import ToolEnvironment, reads_calls

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Episode:
    """One row: a prompt, the turns of the policy and the answers to them."""

    example: Mapping[str, Any]  # the dataset's row
    prompt_index: int  # which keys its noise, with the sample
    sample: int
    prompt: Messages  # that it began with, or the dataset's if there was no turn
    prompt_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)  # all later ones, as sampled or encoded
    logprobs: list[float] = field(default_factory=list)  # one per token, 0 in an answer
    actions: list[bool] = field(default_factory=list)  # which tokens the policy chose
    rewards: list[float] = field(default_factory=list)  # at the last token of a turn; else NaN
    messages: list[Mapping[str, Any]] = field(default_factory=list)  # after the prompt, if chat
    turns: int = 0  # of the policy
    truncated: bool = False  # by a limit on tokens or turns
    error: str | None = None  # of its environment, which ended it
    environment: Environment | None = None

    @property
    def trained(self) -> list[bool]:
        """The tokens that a loss or a statistic may use.

        There are none if the episode failed, since what they would have led to is not known.
        """
        return self.actions if self.error is None else [False] * len(self.actions)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append a turn of the policy, or without log-probabilities an answer to it."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.actions += [logprobs is not None] * len(tokens)
        self.rewards += [math.nan] * len(tokens)


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """A runner of episodes with the settings of the run."""

    environment_factory: EnvironmentFactory  # of one episode
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]  # each of them ends a turn
    max_turns: int | None = None  # None: as many as the tokens allow
    timeout: float | None = 60.0  # seconds for a `reset` or `step`; None leaves it to them
    tools: Tools = ()  # schemas for the chat template; or a function that has those of a row
    longest_prompt: int | None = None  # in tokens

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
        episodes = [
            Episode(
                example=example,
                prompt_index=index,
                sample=sample,
                prompt=example["prompt"],
                prompt_ids=ids,
            )
            for example, ids, index in zip(examples, tokens, prompt_indices, strict=True)
            for sample in range(n)
        ]
        try:
            with engine.weights_synced(), engine.session(params, seed) as session:
                self._run(session, params.max_tokens, episodes)
        finally:
            for episode in episodes:
                if isinstance(episode.environment, SettlingEnvironment):
                    episode.environment.close()
        errors = [episode.error for episode in episodes if episode.error is not None]
        if errors:
            said = "%d of %d episodes failed; the first: %s"
            logger.warning(said, len(errors), len(episodes), errors[0])
        return episodes

    def _run(self, session: Session, max_tokens: int, episodes: Sequence[Episode]) -> None:
        """Play all episodes to their ends, each going on as soon as it has what it waits for."""
        played = {(e.prompt_index, e.sample): (e, self._play(e, max_tokens)) for e in episodes}
        calls: dict[Future[Any], tuple[int, int]] = {}  # under way, the earliest first
        unopened = Counter(episode.prompt_index for episode in episodes)
        opened: dict[int, dict[tuple[int, ...], list[Episode]]] = defaultdict(dict)

        def sample(tokens: Sequence[int], alike: Sequence[Episode]) -> None:
            """Request the next turn of episodes that all have these tokens."""
            position = len(alike[0].tokens)
            request = Request(
                tokens=tokens,
                prompt_index=alike[0].prompt_index,
                samples=[episode.sample for episode in alike],
                position=position,
                max_tokens=max_tokens - position,
            )
            try:
                session.add(request)
            except ValueError as error:
                for episode in alike:
                    episode.error = f"ValueError: the episode {error}"

        def advance(key: tuple[int, int], result: Future[Any] | Completion | None) -> None:
            """Send an episode what it has waited for, and see to its next move."""
            episode, moves = played[key]
            tokens: list[int] = []
            try:
                move = moves.send(result.result() if isinstance(result, Future) else result)
                if isinstance(move, Future):
                    calls[move] = key
                    return
                tokens = move
            except StopIteration:
                return
            except Exception as error:  # the environment may answer anything
                episode.error = told(error)
            if episode.turns and tokens:
                sample(tokens, [episode])
            elif not episode.turns:
                group = opened[episode.prompt_index]
                if tokens:
                    group.setdefault(tuple(tokens), []).append(episode)
                unopened[episode.prompt_index] -= 1
                if not unopened[episode.prompt_index]:  # those with the same prompt share it
                    for prompt, alike in group.items():
                        sample(prompt, sorted(alike, key=lambda one: one.sample))

        try:
            for key in played:
                advance(key, None)
            while calls or not session.idle:
                for request, number, completion in [] if session.idle else session.step():
                    advance((request.prompt_index, number), completion)
                if session.idle:
                    wait(calls, return_when=FIRST_COMPLETED)
                for call in [call for call in calls if call.done()]:
                    advance(calls.pop(call), call)
        finally:
            for call in calls:
                call.cancel()

    def _play(
        self, episode: Episode, max_tokens: int
    ) -> Generator[Future[Any] | list[int], Any, None]:
        """Play one episode.

        Yields:
            What it waits for, in turn: a call of its environment, whose result it is sent; or the
            tokens that the policy continues, for which it is sent a `Completion`.
        """
        with foreign("environment_factory"):
            environment = episode.environment = self.environment_factory()
        example, prompt_ids = dict(episode.example), episode.prompt_ids
        tools = self.tools(example) if callable(self.tools) else self.tools
        answer = yield call_beside(self.timeout, environment.reset, copy.deepcopy(example))
        prompt = check_prompt(answer, example["prompt"])
        if prompt != example["prompt"]:
            most = self.longest_prompt
            prompt_ids = encode(prompt, self.tokenizer, tools=tools, most=most)
        while True:
            completion = yield [*prompt_ids, *episode.tokens]
            episode.prompt, episode.prompt_ids = prompt, prompt_ids
            ids = completion.tokens
            stop_id = ids[-1] if ids[-1] in self.stop_token_ids else None
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            episode.append(ids, completion.logprobs)
            episode.messages.append({"role": "assistant", "content": text})
            episode.turns += 1
            if self.tools and reads_calls(self.tokenizer):
                text = self.tokenizer.decode(ids if stop_id is None else ids[:-1])
            answer = yield call_beside(self.timeout, environment.step, text)
            messages, reward, done = check_observation(answer, prompt)
            if reward is not None:
                episode.rewards[-1] = reward
            if done or completion.finish_reason == "length" or episode.turns == self.max_turns:
                break
            room = max_tokens - len(episode.tokens) - 1  # with one token after the answer
            ids = encode_answer(messages, self.tokenizer, prompt, stop_id, tools)
            if len(ids) > room:
                break
            episode.append(ids)
            if not isinstance(messages, str):
                episode.messages += [dict(message) for message in messages]
        episode.truncated = completion.finish_reason == "length" or not done
        if episode.truncated and all(map(math.isnan, episode.rewards)):
            # "Does not apply" would spare it the comparison with episodes that were completed.
            episode.rewards[-1] = 0.0
        if isinstance(environment, SettlingEnvironment):
            paid = check_reward((yield call_beside(self.timeout, environment.settle)), "an episode")
            if paid is not None:
                episode.rewards[-1] = paid


def environment_rewards(episodes: Sequence[Episode]) -> Tensor:
    """Return the rewards of the environments, (B,T) float64, at the last token of each turn.

    They are NaN elsewhere, and in all of an episode that failed.
    """
    width = max((len(episode.tokens) for episode in episodes), default=0) or 1
    rewards = torch.full((len(episodes), width), math.nan, dtype=torch.float64)
    for row, episode in zip(rewards, episodes, strict=True):
        if episode.error is None:
            row[: len(episode.rewards)] = torch.tensor(episode.rewards, dtype=torch.float64)
    return rewards


def episode_counts(episodes: Sequence[Episode], device: torch.device) -> Tensor:
    """Count turns, failure, calls of tools and failed calls of each episode, (B,4) float64."""
    counts = []
    for episode in episodes:
        environment, tools = episode.environment, [0, 0]
        if isinstance(environment, ToolEnvironment):
            tools = [environment.calls, environment.failures]
        counts.append([episode.turns, episode.error is not None, *tools])
    return torch.tensor(counts, dtype=torch.float64, device=device).view(-1, 4)


def episode_metrics(counts: Tensor, tools: bool) -> dict[str, float]:
    """Compute metrics over all processes from the rows of `episode_counts`, (N,4).

    `episodes/turns` is the mean number of turns, `episodes/failed` the number of failed episodes,
    `tools/call_frequency` calls per episode, `tools/failure_frequency` failures per call.
    """
    turns, failed, calls, failures = counts.sum(0).tolist()
    metrics = {"episodes/turns": turns / len(counts), "episodes/failed": failed}
    if tools:
        metrics["tools/call_frequency"] = calls / len(counts)
        metrics["tools/failure_frequency"] = failures / calls if calls else math.nan
    return metrics
