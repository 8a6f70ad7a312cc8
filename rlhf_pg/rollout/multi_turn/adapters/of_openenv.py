"""Environments of OpenEnv, each a session with a server that answers `reset` and `step`."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx  # which OpenEnv itself uses
from datasets import Dataset
from openenv import GenericEnvClient
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import quoted, shown, told
from rlhf_pg.boundary.user_code import begin, call_beside, result_of
from rlhf_pg.data.chat import text_of
from rlhf_pg.rollout.multi_turn import environment as ours
from rlhf_pg.rollout.multi_turn.adapters.task import AdaptedTask, own_tools
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, ToolCall

OPTIONS = {
    "prompt": "",  # what the policy is told before the first observation
    "episodes": 1024,  # rows to train on, each a seed for `reset`
    "eval_episodes": 64,
    "action_key": None,  # the field of an action that takes a turn; None: the only string
    "observation_key": None,  # the field that the policy reads; None: the only string, or all
}
PATIENCE = 10.0  # seconds that the server may take to describe its environment
ASIDE = ("done", "reward", "metadata")  # fields of an observation that the policy does not read


def load(name: str, options: Mapping[str, Any], seed: int) -> AdaptedTask:
    """Load the environment behind a server's address; `seed` chooses the rows.

    Every completion of a batch plays in a session of its own, and the server has to allow as many
    at a time. Where actions are calls of tools (MCP), these are offered to the policy.
    """
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ValueError(f"openenv has no option {shown(unknown[0])}, only {', '.join(OPTIONS)}")
    own: dict[str, Any] = {**OPTIONS, **options}
    source = Sessions(name, own["action_key"], own["observation_key"])
    try:
        result_of(call_beside(PATIENCE, source.look))
    except Exception as error:
        raise ValueError(f"the environment server {quoted(name)}: {told(error)}") from error
    total = own["episodes"] + own["eval_episodes"]
    prompt = [{"role": "user", "content": own["prompt"]}]
    rows = [{"prompt": prompt, "seed": 2 * seed * total + i} for i in range(total)]
    held_out = rows[own["episodes"] :]
    train = Dataset.from_list(rows[: own["episodes"]])
    return AdaptedTask(train, Dataset.from_list(held_out) if held_out else None, source)


class Sessions(ours.EnvironmentSource):
    """The source of sessions with one environment server, which may offer tools.

    Args:
        action_key: the field of an action that takes the text; None: the only one that can.
        observation_key: the field of an observation that is shown; None: the only text.
    """

    def __init__(self, url: str, action_key: str | None, observation_key: str | None) -> None:
        self.url, self.action_key, self.observation_key = url, action_key, observation_key
        self.tools: list[dict[str, Any]] | None = None

    async def look(self) -> None:
        """Ask the server for the fields of its actions and observations, and for its tools."""
        async with httpx.AsyncClient(timeout=PATIENCE, follow_redirects=False) as client:
            answer = await client.get(f"{self.url.rstrip('/')}/schema")
            schema = answer.raise_for_status().json()
        action, observation = (schema[k].get("properties", {}) for k in ("action", "observation"))
        self.observation_key = self.observation_key or _only_text(observation)
        if "tool_name" not in action:
            self.action_key = self.action_key or _only_text(action)
            if self.action_key not in action:
                raise ValueError(f"set action_key to the field for a turn: {', '.join(action)}")
            return
        async with GenericEnvClient(base_url=self.url, mode="simulation") as client:
            listed = (await client.step({"type": "list_tools"})).observation["tools"]
        self.tools = []
        for tool in listed:
            parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
            own = {"name": tool["name"], "description": tool.get("description", "")}
            self.tools.append({"type": "function", "function": {**own, "parameters": parameters}})

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return the runner's options: environments that are sessions, and the server's tools."""
        box = own_tools(self.tools or (), tokenizer, timeout, tools)
        return box.runner_options(partial(Session, self))


class Session(ours.SettlingEnvironment):
    """One episode, a session with the server, which executes the calls that `box` parses."""

    def __init__(self, source: Sessions, box: Toolbox) -> None:
        self.source, self.box = source, box
        self.client: Any = None

    async def reset(self, example: dict[str, Any]) -> ours.Messages:
        """Open the session, and return the row's prompt with the first observation behind it."""
        self.client = GenericEnvClient(base_url=self.source.url, mode="simulation")
        await self.client.connect()
        result = await self.client.reset(seed=example["seed"])
        *before, last = example["prompt"]
        texts = [text for text in (last["content"], self._text(result.observation)) if text]
        self.prompt = [*before, {**last, "content": "\n\n".join(texts)}]
        return self.prompt

    async def step(self, completion: str) -> ours.Observation:
        """Take a turn as an action, or make the calls in it, and return what the server says."""
        if self.source.tools is not None:
            return await self._call(self.box.parse(completion, self.prompt))
        result = await self.client.step({self.source.action_key: completion})
        return ours.Observation(self._text(result.observation), result.reward, bool(result.done))

    async def _call(self, calls: Sequence[ToolCall]) -> ours.Observation:
        messages, rewards, done = list[dict[str, Any]](), list[float](), not calls
        for call in calls:
            content = f"Error: {call.error}"
            if call.error is None:
                action = {"tool_name": call.name, "arguments": dict(call.arguments or {})}
                result = await self.client.step({"type": "call_tool", **action})
                rewards += [] if result.reward is None else [result.reward]
                done = done or bool(result.done)
                content = _result(result.observation)
            messages.append({"role": "tool", "name": call.name, "content": content})
        return ours.Observation(messages, sum(rewards) if rewards else None, done)

    async def settle(self) -> None:
        """End the session; its rewards have come turn by turn."""
        client, self.client = self.client, None
        await client.close()

    def close(self) -> None:
        """End the session of an episode that failed, without waiting for the server."""
        if self.client is not None:
            begin(self.settle)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.source.observation_key is not None:
            return str(observation.get(self.source.observation_key, ""))
        visible = {k: v for k, v in observation.items() if k not in ASIDE and v is not None}
        return json.dumps(visible, ensure_ascii=False, default=str) if visible else ""


def _only_text(fields: Mapping[str, Any]) -> str | None:
    texts = [k for k, v in fields.items() if v.get("type") == "string" and k not in ASIDE]
    return texts[0] if len(texts) == 1 else None


def _result(observation: Mapping[str, Any]) -> str:
    """Return the text of what a tool returned, or of its error."""
    if error := observation.get("error"):
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        return ("Error: " if result.get("is_error") else "") + text_of(result)
    return result if isinstance(result, str) else json.dumps(result, default=str)
