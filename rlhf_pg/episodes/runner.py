"""Concurrent multi-turn episodes; each continues as soon as its turn is answered."""

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_pg.boundary.quoted import tell
from rlhf_pg.boundary.user_code import call_concurrently, foreign
from rlhf_pg.data.chat import encode, encode_answer, text_of_completion, whole_turn
from rlhf_pg.data.prompts import Prompt, Tools, tools_of_row
from rlhf_pg.data.rows import Row
from rlhf_pg.episodes.environment import (
    Environment,
    EnvironmentFactory,
    Messages,
    SettlingEnvironment,
    check_observation,
    check_prompt,
    check_reward,
)
from rlhf_pg.episodes.tools import ToolEnvironment
from rlhf_pg.rollout.engine import Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.players import Player
from rlhf_pg.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Episode:
    """One row: a prompt, the turns of the policy and the answers to them."""

    example: Mapping[str, Any]  # the dataset's row
    prompt_index: int  # seeds the noise, together with the sample
    sample: int
    prompt: Messages  # the episode's, or the dataset's if there was no turn
    prompt_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)  # all after the prompt, as sampled or encoded
    logprobs: list[float] = field(default_factory=list)  # one per token, 0 in an answer
    actions: list[bool] = field(default_factory=list)  # which tokens the policy chose
    rewards: list[float] = field(default_factory=list)  # at the last token of a turn; else NaN
    messages: list[Mapping[str, Any]] = field(default_factory=list)  # after the prompt, if chat
    turns: int = 0  # turns of the policy
    truncated: bool = False  # by a limit on tokens or turns
    error: str | None = None  # the environment's error that ended the episode
    environment: Environment | None = None
    # Of an agent's program (`rlhf_pg.agents`).
    offsets: list[int] = field(default_factory=list)  # as in `Batch.parent_offsets`
    branches: list[int] = field(default_factory=list)  # as in `Batch.branches`
    encoded_again: int = 0  # tokens of the policy
    overlaps: bool = False  # it made calls side by side at one endpoint

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append a turn of the policy, or (without log-probabilities) an answer to it."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.actions += [logprobs is not None] * len(tokens)
        self.rewards += [math.nan] * len(tokens)


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner(Player):
    """Plays an episode for each row."""

    environment_factory: EnvironmentFactory  # makes the environment of one episode
    max_turns: int | None = None  # None: as many as the tokens allow
    timeout: float | None = 60.0  # seconds for a `reset` or `step`; None: no limit
    tools: Tools = ()  # schemas for the chat template, or a function from a row to schemas
    longest_prompt: int | None = None  # in tokens

    def play(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
    ) -> Generator[list[Row]]:
        """Play `n` episodes of every prompt; `params.max_tokens` limits all turns and answers of an
        episode together.
        """
        groups = {
            prompt.index: [
                Episode(
                    example=prompt.example,
                    prompt_index=prompt.index,
                    sample=sample,
                    prompt=prompt.opening(),
                    prompt_ids=prompt.ids,
                )
                for sample in range(n)
            ]
            for prompt in prompts
        }
        asked = {prompt.index: prompt for prompt in prompts}
        playing = dict.fromkeys(groups, n)
        episodes = [episode for group in groups.values() for episode in group]
        try:
            with engine.session(params, seed) as session:
                for ended in self._run(session, episodes, params.max_tokens, seed):
                    index = ended.prompt_index
                    playing[index] -= 1
                    if not playing[index]:
                        close(groups[index])
                        yield [self._row(asked[index], x) for x in groups[index]]
        finally:
            for index, count in playing.items():
                if count:
                    close(groups[index])
        errors = [episode.error for episode in episodes if episode.error is not None]
        if errors:
            message = "%d of %d episodes failed; the first: %s"
            logger.warning(message, len(errors), len(episodes), errors[0])

    def _row(self, prompt: Prompt, episode: Episode) -> Row:
        """Return the row of an episode; one that failed is neither trained on nor paid."""
        actions = episode.actions
        rewards = episode.rewards
        if episode.error is not None:
            actions = [False] * len(episode.tokens)
            rewards = [math.nan] * len(episode.tokens)
        if isinstance(episode.prompt, str):
            opened, answer = self.texts(episode.prompt, episode.tokens)
        else:
            opened, answer = whole_turn(episode.prompt, episode.messages)
        return Row(
            prompt_ids=episode.prompt_ids,
            ids=episode.tokens,
            logprobs=episode.logprobs,
            actions=actions,
            offsets=episode.offsets or None,
            branches=episode.branches or None,
            rewards=rewards,
            truncated=episode.truncated,
            group=prompt.index,
            dataset_row=prompt.dataset_row,
            prompt=opened,
            completion=answer,
            columns=prompt.columns(),
            episode=episode,
        )

    def _run(
        self,
        session: Session,
        episodes: Sequence[Episode],
        max_tokens: int,
        seed: int,
    ) -> Iterator[Episode]:
        """Begin all episodes, continue each as soon as its call or completion is done, and yield
        those that have ended.
        """
        ended: list[Episode] = []  # send() and sample() add to it, and the loop yields it
        played = {(e.prompt_index, e.sample): (e, self._play(e, max_tokens)) for e in episodes}

        def send(key: tuple[int, int], value: Any) -> Any:
            """Resume an episode with a result; return its next request, or None at its end."""
            episode, moves = played[key]
            try:
                return moves.send(value)
            except StopIteration:
                pass
            except Exception as error:  # the environment may return anything
                episode.error = tell(error)
            ended.append(episode)
            return None

        def sample(tokens: Sequence[int], alike: Sequence[Episode]) -> None:
            """Request the next turn of episodes that share these tokens."""
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
                ended.extend(alike)

        groups = defaultdict[Any, list[Episode]](list)  # by shared prompt
        resets = {key: send(key, None) for key in played}
        for key, reset in resets.items():
            if reset is not None and (tokens := send(key, reset)) is not None:
                groups[key[0], tuple(tokens)].append(played[key][0])
        for (_, tokens), alike in groups.items():
            sample(tokens, alike)

        calls = dict[Future[Any], tuple[int, int]]()  # calls of environments under way
        while ended or calls or not session.idle:
            yield from ended
            ended.clear()
            arrived: list[tuple[tuple[int, int], Any]] = []
            if session.idle:
                wait(calls, return_when=FIRST_COMPLETED)
            else:
                arrived = [((r.prompt_index, i), turn) for r, i, turn in session.step()]
            arrived += [(calls.pop(call), call) for call in list(calls) if call.done()]
            for key, value in arrived:
                move = send(key, value)
                if isinstance(move, Future):
                    calls[move] = key
                elif move is not None:
                    sample(move, [played[key][0]])

    def _play(
        self,
        episode: Episode,
        max_tokens: int,
    ) -> Generator[Future[Any] | list[int], Any, None]:
        """Play one episode: yield a call of its environment, which is sent back once it is done, or
        the tokens for the policy to continue, in return for which a `Completion` is sent.
        """
        with foreign("environment_factory"):
            environment = episode.environment = self.environment_factory()
        example = dict(episode.example)
        prompt_ids = episode.prompt_ids
        tools = tools_of_row(self.tools, example)
        reset = yield call_concurrently(self.timeout, environment.reset, copy.deepcopy(example))
        prompt = check_prompt(reset.result(), example["prompt"])
        if prompt != example["prompt"]:
            prompt_ids = encode(
                prompt,
                self.tokenizer,
                tools=tools,
                most=self.longest_prompt,
            )
        while True:
            completion = yield [*prompt_ids, *episode.tokens]
            episode.prompt = prompt
            episode.prompt_ids = prompt_ids
            ids = completion.tokens
            stop_id = ids[-1] if ids[-1] in self.stop_token_ids else None
            text = text_of_completion(
                ids,
                self.tokenizer,
                self.skip_special_tokens,
                self.stop_token_ids,
            )
            episode.append(ids, completion.logprobs)
            episode.messages.append({"role": "assistant", "content": text})
            episode.turns += 1
            if self.tools:  # whose calls may have special tokens
                text = text_of_completion(ids, self.tokenizer, False, self.stop_token_ids)
            step = yield call_concurrently(self.timeout, environment.step, text)
            messages, reward, done = check_observation(step.result(), prompt)
            if reward is not None:
                episode.rewards[-1] = reward
            if done or completion.finish_reason == "length" or episode.turns == self.max_turns:
                break
            room = max_tokens - len(episode.tokens) - 1  # leaves one token after the answer
            ids = encode_answer(messages, self.tokenizer, prompt, stop_id, tools)
            if len(ids) > room:
                break
            episode.append(ids)
            if not isinstance(messages, str):
                episode.messages += [dict(message) for message in messages]
        episode.truncated = completion.finish_reason == "length" or not done
        if episode.truncated and all(map(math.isnan, episode.rewards)):
            # NaN would exempt it from the comparison with episodes that were completed.
            episode.rewards[-1] = 0.0
        if isinstance(environment, SettlingEnvironment):
            end = yield call_concurrently(self.timeout, environment.settle)
            paid = check_reward(end.result(), "an episode")
            if paid is not None:
                episode.rewards[-1] = paid

    def metrics(self, rows: Sequence[Row], runtime: Runtime) -> dict[str, float]:
        """Compute metrics of the episodes of all processes; collective."""
        episodes = [row.episode for row in rows]
        users = [e.environment for e in episodes if isinstance(e.environment, ToolEnvironment)]
        counts = [
            len(episodes),
            sum(episode.turns for episode in episodes),
            sum(episode.error is not None for episode in episodes),
            sum(user.calls for user in users),
            sum(user.failures for user in users),
        ]
        sums = torch.tensor(counts, dtype=torch.float64, device=runtime.device)
        count, turns, failed, calls, failures = runtime.all_reduce_sum(sums).tolist()
        metrics = {"episodes/turns": turns / count, "episodes/failed": failed}
        if self.tools:
            metrics["tools/call_frequency"] = calls / count  # calls per episode
            metrics["tools/failure_frequency"] = failures / calls if calls else math.nan
        return metrics


def close(episodes: Sequence[Episode]) -> None:
    """Close the environments that ask for it."""
    for episode in episodes:
        if isinstance(episode.environment, SettlingEnvironment):
            episode.environment.close()
