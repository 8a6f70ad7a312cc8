"""OpenEnv environments: each is a session with a server that answers `reset` and `step`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from openenv import GenericEnvClient

from rlhf_pg.boundary.http import Client
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.boundary.user_code import begin, call_concurrently
from rlhf_pg.data.chat import text_of
from rlhf_pg.episodes.environment import Messages, Observation, SettlingEnvironment
from rlhf_pg.episodes.tools import EnvironmentSource

PATIENCE = 10.0  # timeout in seconds for the server to describe its environment
ASIDE = ("done", "reward", "metadata")  # fields of an observation that the policy does not see


def load(
    url: str,
    seed: int,
    /,
    prompt: str = "",  # text before the first observation
    episodes: int = 1024,  # training rows, each with a seed for `reset`
    eval_episodes: int = 64,
    action_key: str | None = None,  # the action's field for a turn; None: its only string
    observation_key: str | None = None,  # the field to show; None: the only string, or all fields
) -> tuple[Any, Any, EnvironmentSource]:
    """Load the environment of the server at `url`; `seed` chooses the rows.

    Every completion of a batch plays in its own session, so the server has to allow as many
    concurrent sessions. If actions are tool calls (MCP), the tools are offered to the policy.
    """
    try:
        looked = call_concurrently(PATIENCE, _look, url, action_key, observation_key)
        source: EnvironmentSource = looked.result()
    except Exception as error:
        raise ValueError(f"the environment server {quote(url)}: {tell(error)}") from error
    total = episodes + eval_episodes
    start = 2 * seed * total
    first = [{"role": "user", "content": prompt}]
    rows = [{"prompt": first, "seed": start + i} for i in range(total)]
    train = Dataset.from_list(rows[:episodes])
    held_out = Dataset.from_list(rows[episodes:])
    return train, held_out if len(held_out) else None, source


async def _look(
    url: str,
    action_key: str | None,
    observation_key: str | None,
) -> EnvironmentSource:
    """Ask the server for the fields of its actions and observations, and for its tools."""
    client = Client(url.rstrip("/"), PATIENCE, retries=0, concurrency=1)
    action, observation = await client.ask(
        "/schema",
        None,
        lambda schema: [schema[k].get("properties", {}) for k in ("action", "observation")],
    )
    observation_key = observation_key or _only_text(observation)
    if "tool_name" not in action:
        action_key = action_key or _only_text(action)
        if action_key not in action:
            raise ValueError(f"set action_key to the field for a turn: {', '.join(action)}")
        return EnvironmentSource(partial(OpenEnvSession, url, observation_key, action_key))
    async with GenericEnvClient(base_url=url, mode="simulation") as client:
        listed = await client.step({"type": "list_tools"})
    schemas = []
    for tool in listed.observation["tools"]:
        parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
        function = {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": parameters,
        }
        schemas.append({"type": "function", "function": function})
    return EnvironmentSource(partial(OpenEnvSession, url, observation_key, None), schemas)


@dataclass
class OpenEnvSession(SettlingEnvironment):
    """One episode: a session with the server, which rewards each turn."""

    url: str
    observation_key: str | None  # the field that the policy sees; None: all of them
    action_key: str | None  # the action's field for a turn; None: a turn calls tools
    box: Any = None  # the toolbox that parses the calls
    client: Any = None

    async def reset(self, example: dict[str, Any]) -> Messages:
        """Open the session, and return the row's prompt followed by the first observation."""
        self.client = GenericEnvClient(base_url=self.url, mode="simulation")
        await self.client.connect()
        result = await self.client.reset(seed=example["seed"])
        *before, last = example["prompt"]
        texts = (last["content"], self._text(result.observation))
        last = {**last, "content": "\n\n".join(filter(None, texts))}
        self.prompt = [*before, last]
        return self.prompt

    async def step(self, completion: str) -> Observation:
        """Send a turn as an action, or each call in it, and return the server's answer."""
        if self.action_key is not None:
            result = await self.client.step({self.action_key: completion})
            text = self._text(result.observation)
            return Observation(text, result.reward, bool(result.done))
        calls = self.box.parse(completion, self.prompt)
        messages = list[dict[str, Any]]()
        rewards = list[float]()
        done = not calls
        for call in calls:
            content = f"Error: {call.error}"
            if call.error is None:
                action = {
                    "type": "call_tool",
                    "tool_name": call.name,
                    "arguments": dict(call.arguments),
                }
                result = await self.client.step(action)
                if result.reward is not None:
                    rewards.append(result.reward)
                done = done or bool(result.done)
                content = _result(result.observation)
            message = {
                "role": "tool",
                "name": call.name,
                "content": content,
            }
            messages.append(message)
        return Observation(messages, sum(rewards) if rewards else None, done)

    async def settle(self) -> None:
        client = self.client
        self.client = None
        await client.close()

    def close(self) -> None:
        if self.client is not None:  # the episode failed: do not wait for the server
            begin(self.settle)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation_key is not None:
            return str(observation.get(self.observation_key, ""))
        visible = {k: v for k, v in observation.items() if k not in ASIDE and v is not None}
        if visible:
            return json.dumps(visible, ensure_ascii=False, default=str)
        return ""


def _only_text(fields: Mapping[str, Any]) -> str | None:
    texts = [k for k, v in fields.items() if v.get("type") == "string" and k not in ASIDE]
    if len(texts) == 1:
        return texts[0]
    return None


def _result(observation: Mapping[str, Any]) -> str:
    if error := observation.get("error"):
        return f"Error: {error['message']}"
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        return ("Error: " if result.get("is_error") else "") + text_of(result)
    if isinstance(result, str):
        return result
    return json.dumps(result, default=str)
