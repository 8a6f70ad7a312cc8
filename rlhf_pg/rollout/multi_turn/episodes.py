"""Concurrent episodes of several turns, each of which continues as soon as it is answered."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_code import call_beside, foreign
from rlhf_pg.data.chat import TooLong, encode, encode_answer
from rlhf_pg.data.records import pad_rows
from rlhf_pg.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.multi_turn.environment import (
    Environment,
    EnvironmentFactory,
    Messages,
    Schemas,
    SettlingEnvironment,
    checked_observation,
    checked_prompt,
    checked_reward,
)
from rlhf_pg.rollout.multi_turn.tools import ToolEnvironment

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Episode:
    """One row: a prompt, the turns of the policy and the answers to them."""

    example: Mapping[str, Any]  # the dataset's row
    prompt_index: int  # which keys its noise, with the sample
    sample: int
    given: Sequence[int]  # the tokens of the dataset's prompt
    prompt: Messages  # that it began with, or the dataset's if `reset` failed
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
    resetting: bool = True  # the environment has not begun yet
    cut_off: bool = False  # the limit on tokens cut off its last turn
    stop_id: int | None = None  # the token that ended its last turn

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

    def truncate(self) -> None:
        """Mark the episode as cut off by a limit.

        If it has no reward so far, it gets 0: "does not apply" would spare it the comparison with
        episodes that were completed.
        """
        self.truncated = True
        if all(math.isnan(reward) for reward in self.rewards):
            self.rewards[-1] = 0.0


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """A runner of episodes with the settings of the run."""

    environment_factory: EnvironmentFactory  # of one episode
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]  # each of them ends a turn
    max_turns: int | None = None  # None: as many as the tokens allow
    timeout: float | None = 60.0  # seconds for a `reset` or `step`; None leaves it to them
    tools: Schemas | Callable[[Mapping[str, Any]], Schemas] = ()  # for the template, or of a row
    special_tokens: bool = False  # an environment reads them, but for the stop token
    longest_prompt: int | None = None  # in tokens

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
        episodes = [
            Episode(
                example=example,
                prompt_index=index,
                sample=sample,
                given=ids,
                prompt=example["prompt"],
                prompt_ids=ids,
            )
            for example, ids, index in zip(examples, tokens, prompt_indices, strict=True)
            for sample in range(n)
        ]
        playing = None
        try:
            with engine.weights_synced(), engine.session(params, seed) as session:
                playing = _Playing(self, session, params.max_tokens, episodes)
                playing.run()
        finally:
            for future in playing.waiting if playing is not None else ():
                future.cancel()
            for episode in episodes:
                if isinstance(episode.environment, SettlingEnvironment):
                    episode.environment.close()
        errors = [episode.error for episode in episodes if episode.error is not None]
        if errors:
            said = "%d of %d episodes failed; the first: %s"
            logger.warning(said, len(errors), len(episodes), errors[0])
        return episodes


class _Playing:
    """The episodes of one call of `EpisodeRunner.play`."""

    def __init__(
        self,
        runner: EpisodeRunner,
        session: Session,
        max_tokens: int,
        episodes: Sequence[Episode],
    ) -> None:
        self.runner, self.session, self.max_tokens = runner, session, max_tokens
        self.groups: dict[int, dict[int, Episode]] = {}  # by prompt_index and sample
        for episode in episodes:
            self.groups.setdefault(episode.prompt_index, {})[episode.sample] = episode
        # The episode of each call, and the method that takes the result and says if a turn follows.
        self.waiting: dict[Future[Any], tuple[Episode, Callable[[Episode, Any], bool]]] = {}

    def run(self) -> None:
        for prompt_index, group in self.groups.items():
            for episode in group.values():
                self._reset(episode)
            self._start(prompt_index)  # does nothing while a reset is pending
        while self.waiting or not self.session.idle:
            finished = [] if self.session.idle else self.session.step()
            for request, sample, completion in finished:
                self._turn(self.groups[request.prompt_index][sample], completion)
            if self.session.idle:
                wait(self.waiting, return_when=FIRST_COMPLETED)
            for future in [future for future in self.waiting if future.done()]:  # as they began
                self._returned(future)

    def _call(
        self, episode: Episode, take: Callable[[Episode, Any], bool], method: Any, *arguments: Any
    ) -> None:
        self.waiting[call_beside(self.runner.timeout, method, *arguments)] = episode, take

    def _returned(self, future: Future[Any]) -> None:
        episode, take = self.waiting.pop(future)
        goes_on = False
        try:
            goes_on = take(episode, future.result())
        except Exception as error:  # the answer may be anything
            episode.error = told(error)
        if goes_on:
            self._ask([episode])
        if episode.resetting:
            episode.resetting = False
            self._start(episode.prompt_index)

    # ---------------------------------------------------------------------------- the first turn

    def _reset(self, episode: Episode) -> None:
        try:
            with foreign("environment_factory"):
                episode.environment = self.runner.environment_factory()
                reset = episode.environment.reset
        except Exception as error:
            episode.error, episode.resetting = told(error), False
            return
        self._call(episode, self._prompted, reset, copy.deepcopy(dict(episode.example)))

    def _prompted(self, episode: Episode, prompt: Any) -> bool:
        prompt = checked_prompt(prompt, episode.example["prompt"])
        if prompt != episode.example["prompt"]:
            runner, tools = self.runner, self.runner.tools_of(episode.example)
            ids = encode(prompt, runner.tokenizer, tools=tools, most=runner.longest_prompt)
            episode.prompt, episode.prompt_ids = prompt, ids
        return False

    def _start(self, prompt_index: int) -> None:
        """Ask for the first turns of a group once all of its episodes are reset.

        Episodes with the same prompt share its computation.
        """
        group = self.groups[prompt_index].values()
        if any(episode.resetting for episode in group):
            return
        alike: dict[tuple[int, ...], list[Episode]] = {}
        for episode in group:
            if episode.error is None:
                alike.setdefault(tuple(episode.prompt_ids), []).append(episode)
        for episodes in alike.values():
            self._ask(episodes)

    # --------------------------------------------------------------------------------- every turn

    def _ask(self, episodes: Sequence[Episode]) -> None:
        """Ask for the next turn of episodes with the same tokens."""
        first = episodes[0]
        position = len(first.tokens)
        request = Request(
            tokens=[*first.prompt_ids, *first.tokens],
            prompt_index=first.prompt_index,
            samples=[episode.sample for episode in episodes],
            position=position,
            max_tokens=self.max_tokens - position,
        )
        try:
            self.session.add(request)
        except ValueError as error:
            for episode in episodes:
                episode.error = f"ValueError: the episode {error}"
                if not position:  # a refused prompt must not reach the model
                    episode.prompt, episode.prompt_ids = episode.example["prompt"], episode.given

    def _turn(self, episode: Episode, completion: Completion) -> None:
        ids, runner = completion.tokens, self.runner
        episode.stop_id = ids[-1] if ids[-1] in runner.stop_token_ids else None
        episode.cut_off = completion.finish_reason == "length"
        text = runner.tokenizer.decode(ids, skip_special_tokens=True)
        episode.append(ids, completion.logprobs)
        episode.messages.append({"role": "assistant", "content": text})
        episode.turns += 1
        if runner.special_tokens:
            text = runner.tokenizer.decode(ids if episode.stop_id is None else ids[:-1])
        assert episode.environment is not None
        self._call(episode, self._observed, episode.environment.step, text)

    def _observed(self, episode: Episode, answer: Any) -> bool:
        runner, environment = self.runner, episode.environment
        messages, reward, done = checked_observation(answer, episode.prompt)
        if reward is not None:
            episode.rewards[-1] = reward
        ids = None
        if not done and not episode.cut_off and episode.turns != runner.max_turns:
            room = self.max_tokens - len(episode.tokens) - 1  # with one token after the answer
            tools = runner.tools_of(episode.example)
            try:
                ids = encode_answer(
                    messages, runner.tokenizer, episode.prompt, episode.stop_id, tools, room
                )
            except TooLong:
                ids = None
            if ids is not None and len(ids) <= room:
                episode.append(ids)
                if not isinstance(messages, str):
                    episode.messages += [dict(message) for message in messages]
                return True
        if episode.cut_off or not done:
            episode.truncate()
        if isinstance(environment, SettlingEnvironment):
            self._call(episode, self._settled, environment.settle)
        return False

    def _settled(self, episode: Episode, reward: Any) -> bool:
        if (paid := checked_reward(reward, "an episode")) is not None:
            episode.rewards[-1] = paid
        return False


def environment_rewards(episodes: Sequence[Episode]) -> Tensor:
    """Return the rewards of the environments, (B,T) float64, at the last token of each turn.

    They are NaN elsewhere, and in all of an episode that failed.
    """
    mask = pad_rows([episode.tokens for episode in episodes], 0)[1]
    rewards = torch.full(mask.shape, math.nan, dtype=torch.float64)
    flat = [
        reward if trained else math.nan
        for episode in episodes
        for reward, trained in zip(episode.rewards, episode.trained, strict=True)
    ]
    rewards[mask] = torch.tensor(flat, dtype=torch.float64)
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
