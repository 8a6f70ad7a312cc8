"""Tools that the policy calls through its chat template, and the sources of environments."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from rlhf_pg.boundary.quoted import show, tell
from rlhf_pg.boundary.user_code import call_concurrently
from rlhf_pg.data.chat import encode_answer, render_chat
from rlhf_pg.data.prompts import Schemas
from rlhf_pg.episodes.environment import Messages, Observation

Tool = Callable[..., Any]

TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """A tool call in a turn, or the reason why it cannot be parsed."""

    name: str = ""
    arguments: Mapping[str, Any] = {}
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """The tools of the policy; ValueError if its chat template cannot show them."""

    schemas: Schemas
    tokenizer: PreTrainedTokenizerBase  # the policy's
    functions: Mapping[str, Tool] = field(default_factory=dict)  # empty: environments call tools
    timeout: float | None = None  # seconds for a call of a function

    def __post_init__(self) -> None:
        if not self.schemas:
            return
        chat = [{"role": "user", "content": "?"}]
        result = {"role": "tool", "name": "tool", "content": "!"}  # the template must take it too
        encode_answer([result], self.tokenizer, chat, None, self.schemas)

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, timeout: float
    ) -> "Toolbox":
        """Collect functions with type hints and Google-style docstrings (else ValueError)."""
        try:
            schemas = [get_json_schema(tool) for tool in tools]
        except Exception as error:  # transformers may raise anything
            raise ValueError(f"tools: a function has no usable schema: {error}") from error
        names = [schema["function"]["name"] for schema in schemas]
        functions = dict(zip(names, tools, strict=True))
        if len(functions) < len(tools):
            raise ValueError(f"tools: two have the same name, among {', '.join(functions)}")
        return cls(schemas=schemas, tokenizer=tokenizer, functions=functions, timeout=timeout)

    def parse(self, completion: str, prompt: Any) -> list[ToolCall]:
        """Return the calls in a turn.

        The tokenizer's `response_template` parses them if it has one. Otherwise they are JSON
        between <tool_call> and </tool_call>, as Hermes and Qwen write them.
        """
        if getattr(self.tokenizer, "response_template", None) is None:
            # After the last closing tag, the regex would search from each opening tag to the end.
            closed = "".join(completion.rpartition("</tool_call>")[:2])
            return [_read_call(text) for text in TAGGED.findall(closed)]
        tools = list(self.schemas)
        try:
            opened = render_chat(prompt, self.tokenizer, "the prompt", tools=tools)
            message = self.tokenizer.parse_response(completion, prefix=opened, tools=tools)
            calls = message.get("tool_calls") or []
            return [_read_call(call.get("function", call)) for call in calls]
        except Exception as error:  # the policy's text may be anything
            return [ToolCall(error=f"the call cannot be read: {tell(error)}")]


class ToolEnvironment:
    """The environment of one episode with tools, which ends with a turn that calls none."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.functions = toolbox.functions
        self.calls = self.failures = 0  # failed: unreadable, unknown tool, raised or timed out
        self.prompt: Any = None

    def reset(self, example: dict[str, Any]) -> Messages:
        self.prompt = example["prompt"]
        return example["prompt"]  # type: ignore[no-any-return]

    def step(self, completion: str) -> Observation:
        """Answer with one message of the role "tool" for every call; the calls run concurrently."""
        calls = self.toolbox.parse(completion, self.prompt) if self.functions else []
        self.calls += len(calls)
        begun = [(call.name, self._begin(call)) for call in calls]
        messages = [
            {"role": "tool", "name": name, "content": self._content(result)}
            for name, result in begun
        ]
        return Observation(messages, done=not calls)

    def _begin(self, call: ToolCall) -> Future[Any] | str:
        """Begin a call, or return the error that prevents it."""
        if call.error is not None:
            return call.error
        if call.name not in self.functions:
            return f"there is no tool {call.name!r}, only {', '.join(self.functions)}"
        return call_concurrently(self.toolbox.timeout, self.functions[call.name], **call.arguments)

    def _content(self, result: Future[Any] | str) -> str:
        """Return the result of a call as text, or its error."""
        if isinstance(result, Future):
            try:
                value = result.result()
                if not isinstance(value, str):
                    value = json.dumps(value, default=str, ensure_ascii=False)
                return value.encode(errors="replace").decode()  # half a surrogate pair has no token
            except Exception as error:
                result = tell(error)
        self.failures += 1
        return f"Error: {result}"


@dataclass(eq=False)
class EnvironmentSource:
    """The source of a run's environments; `factory` makes one for each episode.

    `schemas` describe tools that the environments call themselves. If there are any, the factory is
    given the `Toolbox` that parses the policy's calls.
    """

    factory: Callable[..., Any]
    schemas: Schemas = ()
    pays = True  # whether its environments give rewards

    def runner_options(
        self, tokenizer: PreTrainedTokenizerBase, timeout: float, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return options of an `EpisodeRunner`; `timeout` is in seconds for a call. ValueError for
        tools that the environments cannot take.
        """
        if tools:
            raise ValueError(
                "give tools or environment_factory, not both: an environment can call tools itself"
            )
        factory = self.factory
        if self.schemas:
            factory = partial(factory, Toolbox(schemas=self.schemas, tokenizer=tokenizer))
        return {"environment_factory": factory, "timeout": timeout, "tools": self.schemas}

    def add_prompts(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Return the dataset with a column `prompt`, if the environments bring the prompts; a
        missing dataset becomes one of `rows` rows.
        """
        return dataset


def source_of(factory: Any) -> EnvironmentSource:
    """Return the source of a run's environments; ValueError if the factory makes none."""
    if isinstance(factory, EnvironmentSource):
        return factory
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "step")):
        raise ValueError(
            "environment_factory must make environments with reset(example) and step(completion), "
            f"got {show(factory)}; wrap TRL's environments in "
            "rlhf_pg.episodes.adapters.TrlEnvironments"
        )
    return EnvironmentSource(factory)


def _read_call(call: Any) -> ToolCall:
    """Parse the name and arguments of a call; the call or its arguments may be JSON text."""
    try:
        call = json.loads(call) if isinstance(call, str) else call
        name = call["name"]
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    except (AttributeError, LookupError, TypeError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall(error='a call needs a "name" and "arguments", an object')
    return ToolCall(name, arguments)
