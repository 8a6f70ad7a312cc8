"""Environments of the library `verifiers`, written as modules with a `load_environment()`.

Such an environment runs its rollout itself and asks a client for every turn of the model. Here the
client waits for the policy's next turn, so whatever the environment does in between is its own.
"""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import quoted, shown, told
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.rollout.multi_turn.adapters.task import AdaptedTask
from rlhf_pg.rollout.multi_turn.environment import (
    EnvironmentSource,
    Messages,
    Observation,
    Schemas,
    SettlingEnvironment,
)
from rlhf_pg.rollout.multi_turn.tools import TAGGED, Tool, Toolbox, ToolCall, check_template

NOT_INSTALLED = 'verifiers is not installed: pip install "verifiers>=0.3,<0.4"'


def load_verifiers(env_id: str, options: Mapping[str, Any], seed: int) -> AdaptedTask:
    """Load an installed environment of `verifiers`; its rubric is the reward "environment".

    Args:
        env_id: as `verifiers.load_environment` takes it.
        options: the environment's own arguments.
        seed: not used: the environment's arguments decide what is random.

    Raises:
        ValueError: it is not installed, cannot be loaded, or compares completions of a group.
    """
    try:
        import verifiers
    except ImportError as error:
        raise ValueError(NOT_INSTALLED) from error
    if not hasattr(verifiers, "load_environment"):
        raise ValueError(
            f"verifiers {getattr(verifiers, '__version__', '')} has no environments with "
            'load_environment() any more: pip install "verifiers>=0.3,<0.4"'
        )
    try:
        with foreign(f"the environment {env_id}"):
            environment = verifiers.load_environment(env_id, **options)
            train, evaluation = environment.build_dataset(), environment.build_eval_dataset()
    except Exception as error:
        raise ValueError(
            f"the environment {quoted(env_id)} cannot be loaded: {told(error)}"
        ) from error
    _refuse_unfit(environment, env_id)
    data = train if train is not None else evaluation
    return AdaptedTask(
        train_dataset=data,
        eval_dataset=evaluation,
        reward_funcs=[],
        environment_factory=VerifiersEnvironments(environment),
        tools=(),
    )


def _refuse_unfit(environment: Any, env_id: str) -> None:
    if environment.dataset is None and environment.eval_dataset is None:
        raise ValueError(f"the environment {quoted(env_id)} has no dataset")
    if environment.rubric.has_group_rewards:
        raise ValueError(
            f"the rubric of {quoted(env_id)} compares the completions of a group, which is done "
            "here by the algorithm: give each completion a reward of its own"
        )


@dataclass(frozen=True)
class VerifiersEnvironments(EnvironmentSource):
    """The source of episodes in one environment of `verifiers`, which serves them all."""

    environment: Any

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return what plays in this environment, with its tools."""
        if tools:
            raise ValueError("tools: an environment of verifiers has its own, give none")
        schemas = _schemas(self.environment.tool_defs)
        if schemas:
            check_template(tokenizer, schemas)
        box = Toolbox(functions={}, schemas=schemas, tokenizer=tokenizer, timeout=timeout)
        return {
            "environment_factory": partial(VerifiersEnvironment, self.environment, box),
            "timeout": timeout,
            "tools": schemas,
            "special_tokens": bool(schemas) and box.reads_tokens,
        }


class VerifiersEnvironment(SettlingEnvironment):
    """One episode, which is a rollout of the environment that waits for the policy's turns.

    Args:
        environment: a `verifiers.Environment`.
        box: reads calls of the environment's tools, and makes none.
    """

    def __init__(self, environment: Any, box: Toolbox) -> None:
        self.environment, self.box = environment, box
        self.client = _client_type()()
        self.rollout: asyncio.Task[Any] | None = None
        self.said: list[Any] = []  # the conversation so far
        self.prompt: Messages = ""

    async def reset(self, example: dict[str, Any]) -> Messages:
        """Begin the rollout, and return the prompt of its first turn."""
        self.loop = asyncio.get_running_loop()
        self.rollout = self.loop.create_task(
            self.environment.run_rollout(example, self.client, "policy", {})
        )
        asked = await self._asked()
        if asked is None:
            raise RuntimeError(f"the rollout ended before the first turn: {await self._outcome()}")
        offered = [tool.name for tool in asked.tools or ()]
        if offered != [schema["function"]["name"] for schema in self.box.schemas]:
            raise ValueError(
                f"the environment offers the tools {shown(offered)} in this row, which are not "
                "those that it has for all rows"
            )
        self.said = list(asked.messages)
        given, own = example["prompt"], _plain(self.said)
        self.prompt = given if _plain_given(given) == own else own
        return self.prompt

    async def step(self, completion: str) -> Observation:
        """Hand a turn to the rollout, and return what it adds before the next, if there is one."""
        self.client.answer(self._response(completion))
        asked = await self._asked()
        if asked is None:
            return Observation(done=True)
        before, now = self.said, list(asked.messages)
        if now[: len(before)] != before or len(now) <= len(before) + 1:
            raise ValueError(
                "the environment changed earlier messages, and the policy cannot take back what it "
                "has read: only append"
            )
        self.said = now
        return Observation(_plain(now[len(before) + 1 :]))

    async def settle(self) -> float:
        """Return the reward of the rubric; a rollout that was cut off ends here."""
        self.client.cut_off()
        outcome = await self._outcome()
        if outcome["error"] is not None:
            raise RuntimeError(f"the environment failed: {shown(outcome['error'])}")
        return float(outcome["reward"])

    def close(self) -> None:
        """Cancel a rollout that nobody continues."""
        if self.rollout is not None and not self.rollout.done():
            self.loop.call_soon_threadsafe(self.rollout.cancel)

    async def _asked(self) -> Any:
        """Wait for the next turn that the rollout asks for; None if it ends."""
        assert self.rollout is not None
        asked = self.loop.create_task(self.client.asked.get())
        await asyncio.wait({asked, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        await self._outcome()  # raises what it raised
        return None

    async def _outcome(self) -> Any:
        assert self.rollout is not None
        return await asyncio.shield(self.rollout)

    def _response(self, completion: str) -> Any:
        from verifiers.types import Response, ResponseMessage

        calls = self.box.parse(completion, self.prompt) if self.box.schemas else []
        message = ResponseMessage(
            content=TAGGED.sub("", completion).strip() if calls else completion,
            tool_calls=[_call(call, i) for i, call in enumerate(calls)] or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id="turn", created=0, model="policy", message=message)


def _call(call: ToolCall, number: int) -> Any:
    """Return a call as the library has it; one that cannot be read has no JSON as arguments."""
    from verifiers.types import ToolCall as Theirs

    arguments = call.error if call.arguments is None else json.dumps(call.arguments)
    return Theirs(id=f"call_{number}", name=call.name or "unreadable", arguments=arguments)


@functools.cache
def _client_type() -> Any:
    """Make the class of a client whose turns come from the policy."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError

    class PolicyClient(Client):  # type: ignore[misc]
        """A client that hands every request to the episode, and waits for the policy's turn."""

        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[Asked] = asyncio.Queue()
            self.turn: asyncio.Future[Any] | None = None

        def answer(self, response: Any) -> None:
            """Answer the request that waits."""
            assert self.turn is not None
            self.turn.set_result(response)

        def cut_off(self) -> None:
            """Refuse the request that waits, if one does: there is no room for a turn."""
            if self.turn is not None and not self.turn.done():
                self.turn.set_exception(OverlongPromptError("the episode was cut off"))

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            self.turn = asyncio.get_running_loop().create_future()
            self.asked.put_nowait(Asked(prompt, tools))
            return await self.turn

        def setup_client(self, config: Any) -> None:
            """Do nothing: there is no server."""

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def raise_from_native_response(self, response: Any) -> None:
            """Do nothing: the policy's turn is always valid."""

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            """Do nothing: there is no server."""

    return PolicyClient


class Asked(NamedTuple):
    """A request for a turn."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None


def _schemas(tools: Sequence[Any] | None) -> Schemas:
    names = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {name: getattr(tool, name) for name in names}}
        for tool in tools or ()
    ]


def _plain(messages: Sequence[Any]) -> Messages:
    """Return messages of the library as a chat, or as the text that they are."""
    told = [message.model_dump(exclude_none=True) for message in messages]
    if told and all(message["role"] == "text" for message in told):
        return "".join(message["content"] for message in told)
    return told


def _plain_given(prompt: Messages) -> Messages:
    """Return a dataset's prompt without the entries that its table has made up."""
    if isinstance(prompt, str):
        return prompt
    return [{k: v for k, v in message.items() if v is not None} for message in prompt]
