"""Environments of OpenEnv, each a session with a server that answers `reset` and `step`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import quoted, shown, told
from rlhf_pg.boundary.user_code import begin, wait_for
from rlhf_pg.data.chat import text_of
from rlhf_pg.rollout.multi_turn.adapters.task import AdaptedTask
from rlhf_pg.rollout.multi_turn.environment import (
    EnvironmentSource,
    Messages,
    Observation,
    Schemas,
    SettlingEnvironment,
    checked_reward,
)
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, ToolCall, check_template

NOT_INSTALLED = 'openenv is not installed: pip install "openenv>=0.10"'
PATIENCE = 10.0  # seconds that the server may take to describe its environment
ASIDE = ("done", "reward", "metadata")  # fields of an observation that the policy does not read


@dataclass(frozen=True, kw_only=True)
class OpenEnvOptions:
    """The options of a task: what its server cannot tell.

    Attributes:
        prompt: what the policy is told before the first observation.
        episodes, eval_episodes: rows to train on and to evaluate on; each is a seed for `reset`.
        action_key: the field of an action that takes the text of a turn; by default the only one
            that is a string.
        observation_key: the field of an observation that the policy reads; by default the only one
            that is a string, and otherwise the whole observation as JSON.
    """

    prompt: str = ""
    episodes: int = 1024
    eval_episodes: int = 64
    action_key: str | None = None
    observation_key: str | None = None


def load_openenv(url: str, options: Mapping[str, Any], seed: int) -> AdaptedTask:
    """Load the environment behind a server's address as a task.

    Every completion of a batch plays in a session of its own, and the server has to allow as many
    at a time. Where actions are calls of tools (MCP), these are offered to the policy.

    Args:
        url: http://... or https://...
        options: the fields of `OpenEnvOptions`.
        seed: of the first training row; the rows for evaluation come before it.

    Raises:
        ValueError: OpenEnv is not installed, an option is unknown, or the server does not answer.
    """
    try:
        import openenv  # noqa: F401
    except ImportError as error:
        raise ValueError(NOT_INSTALLED) from error
    unknown = sorted(options.keys() - OpenEnvOptions.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(
            f"openenv has no option {shown(unknown[0])}, only "
            f"{', '.join(OpenEnvOptions.__dataclass_fields__)}"
        )
    said = OpenEnvOptions(**options)
    try:
        source = wait_for(_look(url, said))
    except Exception as error:
        raise ValueError(f"the environment server {quoted(url)}: {told(error)}") from error
    first = 2 * seed * (said.episodes + said.eval_episodes)
    training = range(first, first + said.episodes)
    held_out = range(training.stop, training.stop + said.eval_episodes)
    return AdaptedTask(
        train_dataset=_rows(said.prompt, training),
        eval_dataset=_rows(said.prompt, held_out) if held_out else None,
        reward_funcs=[],
        environment_factory=source,
        tools=(),
    )


def _rows(prompt: str, seeds: range) -> Dataset:
    asked = [{"role": "user", "content": prompt}]
    return Dataset.from_list([{"prompt": asked, "seed": seed} for seed in seeds])


async def _look(url: str, options: OpenEnvOptions) -> "OpenEnvEnvironments":
    """Ask a server for the fields of its actions and observations, and for its tools."""
    import httpx  # which OpenEnv itself uses

    async with httpx.AsyncClient(timeout=PATIENCE, follow_redirects=False) as client:
        answer = await client.get(f"{url.rstrip('/')}/schema")
        answer.raise_for_status()
        schema = answer.json()
    action, observation = (schema[kind].get("properties", {}) for kind in ("action", "observation"))
    shown_key = options.observation_key or _only_text(observation)
    if "tool_name" in action:
        tools = await asyncio.wait_for(_tools(url), PATIENCE)
        return OpenEnvEnvironments(url, None, shown_key, tools)
    key = options.action_key or _only_text(action)
    if key is None or key not in action:
        raise ValueError(
            "set action_key to the field of an action that takes the text of a turn: one of "
            f"{', '.join(sorted(action.keys() - {'metadata'}))}"
        )
    return OpenEnvEnvironments(url, key, shown_key, [])


def _only_text(properties: Mapping[str, Any]) -> str | None:
    texts = [
        name
        for name, field in properties.items()
        if field.get("type") == "string" and name not in ASIDE
    ]
    return texts[0] if len(texts) == 1 else None


async def _tools(url: str) -> Schemas:
    client = _client(url)
    try:
        await client.connect()
        listed = await client.step({"type": "list_tools"})
    finally:
        await client.close()
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in listed.observation["tools"]
    ]


def _client(url: str) -> Any:
    from openenv import GenericEnvClient

    return GenericEnvClient(base_url=url, mode="simulation")


@dataclass(frozen=True)
class OpenEnvEnvironments(EnvironmentSource):
    """The source of sessions with one environment server.

    Attributes:
        url: of the server.
        action_key: the field that takes the text of a turn; None where turns call tools.
        observation_key: the field that the policy reads; None for all of them.
        tools: schemas of the server's tools.
    """

    url: str
    action_key: str | None
    observation_key: str | None
    tools: Schemas

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return the runner's options: environments that are sessions, and the server's tools."""
        if tools:
            raise ValueError("tools: an environment of OpenEnv has its own, give none")
        if self.tools:
            check_template(tokenizer, self.tools)
        box = Toolbox(functions={}, schemas=self.tools, tokenizer=tokenizer, timeout=timeout)
        return {
            "environment_factory": partial(OpenEnvEnvironment, self, box),
            "timeout": timeout,
            "tools": self.tools,
            "special_tokens": bool(self.tools) and box.reads_tokens,
        }


class OpenEnvEnvironment(SettlingEnvironment):
    """One episode, a session with the server.

    Args:
        source: of the sessions.
        box: parses calls of tools; the server executes them.
    """

    def __init__(self, source: OpenEnvEnvironments, box: Toolbox) -> None:
        self.source, self.box = source, box
        self.client: Any = None
        self.prompt: Messages = ""

    async def reset(self, example: dict[str, Any]) -> Messages:
        """Open the session, and return the row's prompt with the first observation behind it."""
        self.client = _client(self.source.url)
        await self.client.connect()
        result = await self.client.reset(seed=example["seed"])
        *before, last = example["prompt"]
        texts = [text for text in (last["content"], self._text(result.observation)) if text]
        self.prompt = [*before, {**last, "content": "\n\n".join(texts)}]
        return self.prompt

    async def step(self, completion: str) -> Observation:
        """Take a turn as an action, or make the calls in it, and return what the server says."""
        if self.source.action_key is None:
            return await self._call(self.box.parse(completion, self.prompt))
        result = await self.client.step({self.source.action_key: completion})
        return Observation(self._text(result.observation), result.reward, bool(result.done))

    async def _call(self, calls: Sequence[ToolCall]) -> Observation:
        messages: list[dict[str, Any]] = []
        paid: list[float] = []
        done = not calls
        for call in calls:
            content = f"Error: {call.error}"
            if call.error is None:
                action = {"tool_name": call.name, "arguments": dict(call.arguments or {})}
                result = await self.client.step({"type": "call_tool", **action})
                reward = checked_reward(result.reward, "a call")
                paid += [] if reward is None else [reward]
                done = done or bool(result.done)
                content = _result(result.observation)
            messages.append({"role": "tool", "name": call.name, "content": content})
        return Observation(messages, sum(paid) if paid else None, done)

    async def settle(self) -> None:
        """End the session; its rewards have come turn by turn."""
        client, self.client = self.client, None
        await client.close()

    def close(self) -> None:
        """End the session of an episode that failed, without waiting for the server."""
        if self.client is not None:
            begin(self.settle)

    def _text(self, observation: Mapping[str, Any]) -> str:
        key = self.source.observation_key
        if key is not None:
            return str(observation.get(key, ""))
        visible = {k: v for k, v in observation.items() if k not in ASIDE and v is not None}
        return json.dumps(visible, ensure_ascii=False, default=str) if visible else ""


def _result(observation: Mapping[str, Any]) -> str:
    """Return the text of what a tool returned, or of its error."""
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        failed = "Error: " if result.get("is_error") else ""
        return failed + text_of(result)
    return result if isinstance(result, str) else json.dumps(result, default=str)
