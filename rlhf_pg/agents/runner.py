"""Run agents' programs, each with an endpoint of its own, and make a row of each episode."""

import asyncio
import copy
import json
import logging
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from rlhf_pg.agents.endpoint import Agent, Branch, Call, CallRefused, Endpoint, serve
from rlhf_pg.agents.history import History, TokenTree, common
from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.boundary.user_code import call_concurrently
from rlhf_pg.config.files import names_function
from rlhf_pg.data.rows import Row
from rlhf_pg.episodes.environment import check_reward
from rlhf_pg.episodes.runner import Episode, EpisodeRunner
from rlhf_pg.rollout.engine import Session
from rlhf_pg.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentRunner(EpisodeRunner):
    """Runs a program for each episode, with the settings of a run."""

    environment_factory: Any = None
    program: Callable[..., Any]  # of a row and an `Endpoint`
    host: str = "127.0.0.1"
    call_timeout: float | None = None  # seconds for an answer of the policy
    pays: bool = False  # whether the program must, since there is no reward function

    def _run(
        self,
        session: Session,
        episodes: Sequence[Episode],
        max_tokens: int,
        seed: int,
    ) -> Iterator[Episode]:
        """Run the program of every episode, answer its calls, and yield those that have ended.

        The noise of a token depends only on (seed, prompt index, sample, number of the call in its
        episode, position in the answer).
        """
        server = serve(self.host)
        arrivals = SimpleQueue[Any]()
        longest = self.longest_prompt and self.longest_prompt + 1
        running = dict[Future[Any], tuple[Episode, Agent]]()
        sampled = dict[int, Call]()  # by the id of the request
        for episode in episodes:
            history = History(
                self.tokenizer,
                self.stop_token_ids,
                skip_special_tokens=self.skip_special_tokens,
            )
            agent = Agent(
                episode,
                seed,
                history,
                arrivals,
                max_tokens,
                max_calls=self.max_turns,
                longest=longest,
                timeout=self.call_timeout,
            )
            endpoint = server.open(Branch(agent))
            row = copy.deepcopy(dict(episode.example))  # the program may add to its chat
            ended = call_concurrently(self.timeout, self.program, row, endpoint)
            running[ended] = episode, agent
        for ended in running:
            ended.add_done_callback(arrivals.put)
        try:
            while running:
                arrived = arrivals.get() if session.idle or not arrivals.empty() else None
                if isinstance(arrived, Future):  # a program has ended
                    episode, agent = running.pop(arrived)
                    server.close(agent)
                    self._finish(episode, agent, arrived)
                    yield episode
                elif arrived is None:
                    for request, _, completion in session.step():
                        with suppress(InvalidStateError):  # the agent does not wait any more
                            sampled.pop(id(request)).done.set_result(completion)
                elif not arrived.done.cancelled():
                    try:
                        session.add(arrived.request)
                        sampled[id(arrived.request)] = arrived
                    except ValueError as error:
                        arrived.done.set_exception(CallRefused(f"the prompt {error}"))
        finally:  # an engine may fail
            for ended, (_, agent) in running.items():
                server.close(agent)
                ended.cancel()
        if any(episode.overlaps for episode in episodes):
            logger.warning(
                "agent_program made calls side by side, whose order depends on the clock: give "
                "each part of the program an endpoint.fork(), or the run cannot be repeated"
            )

    def _finish(self, episode: Episode, agent: Agent, ended: Future[Any]) -> None:
        """Turn the calls of a program that has ended into the row of its episode."""
        answers = sorted(agent.history.answers, key=lambda answer: answer.number)
        try:
            paid = ended.result()
            if not answers:
                raise ValueError("the program asked nothing of its endpoint")
            if paid is None and self.pays:
                raise ValueError("the program returned no reward, and there is no reward function")
            if not isinstance(paid, list):
                paid = [*[None] * (len(answers) - 1), paid]
            if len(paid) != len(answers):
                raise ValueError(
                    f"the program returned {len(paid)} rewards for {len(answers)} answers"
                )
            rewards = [check_reward(reward, "a call") for reward in paid]
        except Exception as error:  # the program may raise anything
            episode.error = tell(error)
            rewards = [None] * len(answers)
        episode.turns = len(answers)
        episode.overlaps = agent.overlaps
        episode.encoded_again = agent.history.encoded_again
        if not answers:
            return
        tree = TokenTree()
        paths = sorted(branch.path for branch in agent.branches.values())
        for answer in answers:
            tree.add(answer, paths.index(answer.number[:-2]))
        first = answers[0]
        start = len(first.prompt)
        episode.prompt_ids = first.prompt
        episode.tokens = tree.tokens[start:]
        episode.actions = tree.actions[start:]
        episode.logprobs = tree.logprobs[start:]
        episode.branches = tree.branches[start:]
        follows = enumerate(tree.follows[start:], start)
        episode.offsets = [index - before if before >= 0 else 0 for index, before in follows]
        episode.rewards = [math.nan] * len(episode.tokens)
        for end, reward in zip(tree.ends, rewards, strict=True):
            if reward is not None:
                episode.rewards[end - start] = reward
        episode.truncated = agent.truncated
        episode.prompt = first.chat
        if isinstance(first.chat, list):
            last = [answer for answer in answers if isinstance(answer.chat, list)][-1]
            same = common(first.chat, last.chat)
            episode.messages = [*last.chat[same:], last.message]

    def metrics(self, rows: Sequence[Row], runtime: Runtime) -> dict[str, float]:
        """Compute metrics of the episodes of all processes; collective."""
        episodes = [row.episode for row in rows]
        counts = [
            sum(episode.encoded_again for episode in episodes),
            sum(episode.overlaps for episode in episodes),
        ]
        sums = torch.tensor(counts, dtype=torch.float64, device=runtime.device)
        again, overlaps = runtime.all_reduce_sum(sums).tolist()
        return super().metrics(rows, runtime) | {
            "episodes/tokens_encoded_again": again,
            "episodes/overlapping": overlaps,
        }


def program_of(program: Any) -> Any:
    """Return a program from a function, FILE.py:FUNCTION or a command.

    A command reads the row as JSON from its input, and asks at OPENAI_BASE_URL with OPENAI_API_KEY
    for OPENAI_MODEL. If the last line that it prints is a number, that is its reward.
    """
    if callable(program):
        return program
    if names_function(program):
        return user_modules.load(program)
    user_modules.admit(program)

    async def run(example: dict[str, Any], endpoint: Endpoint) -> float | None:
        names = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
        }
        process = await asyncio.create_subprocess_shell(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | names,
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(json.dumps(example, default=str).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            error = quote(err.decode(errors="replace").strip())
            raise ValueError(f"agent_program ended with status {process.returncode}: {error}")
        try:
            return float(out.decode(errors="replace").strip().splitlines()[-1])
        except (IndexError, ValueError):
            return None

    return run
