"""Environments of the library `verifiers`, which is imported with this module.

Such an environment runs its own rollout and asks a client for every turn of the model. Here the
client waits for the policy's next turn, so the environment runs unchanged.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from json import dumps
from typing import Any

from verifiers import load_environment
from verifiers.clients import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall

from rlhf_pg.boundary.quoted import quote, show, tell
from rlhf_pg.episodes.environment import Messages, Observation, SettlingEnvironment
from rlhf_pg.episodes.tools import TAGGED, EnvironmentSource, Toolbox


def load(name: str, seed: int, /, **options: Any) -> tuple[Any, Any, EnvironmentSource]:
    """Load an installed environment with its arguments; its rubric gives the rewards."""
    try:
        environment = load_environment(name, **options)
        train = environment.build_dataset()
        evaluation = environment.build_eval_dataset()
    except Exception as error:
        raise ValueError(f"environment {quote(name)} cannot be loaded: {tell(error)}") from error
    if environment.rubric.has_group_rewards:
        raise ValueError(
            f"the rubric of {quote(name)} compares completions: it has to score each by itself"
        )
    visible = {"name", "description", "parameters"}
    tools = [tool.model_dump(include=visible) for tool in environment.tool_defs or ()]
    schemas = [{"type": "function", "function": tool} for tool in tools]
    source = EnvironmentSource(partial(VerifiersEnvironment, environment), schemas)
    if train is None:
        train = evaluation
    return train, evaluation, source


class VerifiersEnvironment(SettlingEnvironment):
    """One episode: a rollout of the environment that waits for the policy's turns."""

    def __init__(self, environment: Any, box: Toolbox | None = None) -> None:
        self.environment = environment
        self.box = box
        self.client = PolicyClient()
        self.rollout: asyncio.Task[Any] | None = None

    async def reset(self, example: dict[str, Any]) -> Messages:
        """Begin the rollout, and return the prompt of its first turn."""
        self.loop = asyncio.get_running_loop()
        rollout = self.environment.run_rollout(example, self.client, "policy", {})
        self.rollout = self.loop.create_task(rollout)
        self.messages = await self._next_request() or []
        self.prompt = _plain(self.messages)
        return self.prompt

    async def step(self, completion: str) -> Observation:
        """Give the rollout a turn, and return the messages that it adds before the next one."""
        calls = []
        if self.box:
            for i, call in enumerate(self.box.parse(completion, self.prompt)):
                asked = ToolCall(
                    id=f"call_{i}",
                    name=call.name or "unreadable",
                    arguments=call.error or dumps(call.arguments),
                )
                calls.append(asked)
        message = ResponseMessage(
            content=TAGGED.sub("", completion).strip() if calls else completion,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        response = Response(
            id="turn",
            created=0,
            model="policy",
            message=message,
        )
        self.client.turn.set_result(response)
        before = self.messages
        now = await self._next_request()
        if now is None:
            return Observation(done=True)
        added = now[len(before) + 1 :]
        if now[: len(before)] != before or not added:
            raise ValueError("the environment changed earlier messages: only append")
        self.messages = now
        return Observation(_plain(added))

    async def settle(self) -> float:
        """Return the rubric's reward; a rollout that still waits for a turn is ended first."""
        if not self.client.turn.done():
            self.client.turn.set_exception(OverlongPromptError("the episode was cut off"))
        assert self.rollout is not None
        outcome = await asyncio.shield(self.rollout)
        if outcome["error"] is not None:
            raise RuntimeError(f"the environment failed: {show(outcome['error'])}")
        return float(outcome["reward"])

    def close(self) -> None:
        if self.rollout is not None and not self.rollout.done():
            self.loop.call_soon_threadsafe(self.rollout.cancel)

    async def _next_request(self) -> list[Any] | None:
        """Wait for the messages before the next turn; None if the rollout ends without one."""
        request = self.loop.create_task(self.client.requests.get())
        await asyncio.wait({request, self.rollout}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if request.done():
            return request.result()
        request.cancel()
        await self.rollout  # type: ignore[misc]  # raises what it raised
        return None


class PolicyClient(Client):  # type: ignore[misc]
    """A client that passes every request to the episode, and waits for the policy's turn."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
        self.turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(list(prompt))
        return await self.turn

    # Nothing is converted, and there is no server.
    setup_client = close = to_native_tool = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = None


def _plain(messages: Sequence[Any]) -> Messages:
    """Return messages of the library as a chat, or as text."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    if plain and all(message["role"] == "text" for message in plain):
        return "".join(message["content"] for message in plain)
    return plain
