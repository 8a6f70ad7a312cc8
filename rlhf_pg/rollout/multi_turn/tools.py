"""Tools, which are plain functions that the policy calls through its chat template."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_code import call_beside
from rlhf_pg.data.chat import continues, encode, encode_answer
from rlhf_pg.rollout.multi_turn.environment import Messages, Observation

Tool = Callable[..., Any]

TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """A call that the policy asks for, or the reason why it cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """The tools of a run."""

    functions: Mapping[str, Tool]  # by name
    schemas: Sequence[dict[str, Any]]  # the descriptions that the chat template shows
    tokenizer: PreTrainedTokenizerBase  # of the policy; it may be able to parse calls
    timeout: float  # seconds for the calls of a turn

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, timeout: float
    ) -> "Toolbox":
        """Collect functions with type hints and a docstring in Google's style.

        Raises:
            ValueError: two have the same name, or one cannot be described; the message names it.
        """
        schemas = [_schema(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"tools has two functions named {twice[0]}: rename one")
        functions = dict(zip(names, tools, strict=True))
        return cls(functions=functions, schemas=schemas, tokenizer=tokenizer, timeout=timeout)

    @property
    def reads_tokens(self) -> bool:
        """True if the tokenizer itself parses calls, including their special tokens."""
        return getattr(self.tokenizer, "response_template", None) is not None

    def parse(self, completion: str, prompt: Any) -> list[ToolCall]:
        """Return the calls in a turn.

        They are read by the tokenizer's `response_template` if it has one, or else between
        <tool_call> and </tool_call>, in the JSON of Hermes and Qwen.
        """
        if not self.reads_tokens:
            # After the last closing tag, the regex would search from each opening tag to the end.
            closed = "".join(completion.rpartition("</tool_call>")[:2])
            return [_tagged(text) for text in TAGGED.findall(closed)]
        prefilled = continues(prompt)
        opened = self.tokenizer.apply_chat_template(
            prompt,
            tools=list(self.schemas),
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=False,
        )
        try:
            message = self.tokenizer.parse_response(
                completion, prefix=opened, tools=list(self.schemas)
            )
            calls = message.get("tool_calls") or []
            return [_call(call.get("function", call)) for call in calls]
        except Exception as error:  # the policy's text may be anything
            return [ToolCall(error=f"the call cannot be read: {told(error)}")]

    def fault(self, call: ToolCall) -> str | None:
        """Return what is wrong with a call by the schema of its tool, or None."""
        if call.error is not None:
            return call.error
        schemas = {schema["function"]["name"]: schema["function"] for schema in self.schemas}
        if call.name not in self.functions:
            return f"there is no tool {call.name!r}, only {', '.join(self.functions)}"
        parameters = schemas[call.name].get("parameters", {})
        given, known = set(call.arguments or ()), set(parameters.get("properties", {}))
        missing = set(parameters.get("required", ())) - given
        if given - known:
            return f"{call.name} has no argument {min(given - known)!r}"
        return f"{call.name} needs the argument {min(missing)!r}" if missing else None

    def runner_options(self, environment: Callable[["Toolbox"], Any]) -> dict[str, Any]:
        """Return the fields of an `EpisodeRunner` whose environments call these tools.

        Raises:
            ValueError: the chat template cannot show the tools.
        """
        if self.schemas:
            check_template(self.tokenizer, self.schemas)
        return {
            "environment_factory": lambda: environment(self),
            "timeout": self.timeout,
            "tools": self.schemas,
            "special_tokens": bool(self.schemas) and self.reads_tokens,
        }


class ToolEnvironment:
    """The environment of one episode with tools, which goes on until a turn calls none."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.calls = 0
        self.failures = 0  # could not be read or made, raised or were late; the policy is told why
        self.prompt: Any = None

    def reset(self, example: dict[str, Any]) -> Messages:
        """Return the prompt as the dataset has it."""
        self.prompt = example["prompt"]
        return example["prompt"]  # type: ignore[no-any-return]

    def step(self, completion: str) -> Observation:
        """Answer with one message of the role "tool" for every call; the calls run concurrently."""
        box = self.toolbox
        asked = box.parse(completion, self.prompt) if box.functions else []
        begun = [
            box.fault(call)
            or call_beside(box.timeout, box.functions[call.name], **(call.arguments or {}))
            for call in asked
        ]
        answers = []
        for made in begun:
            try:
                if isinstance(made, str):
                    raise _Fault(made)
                said = made.result()
                if not isinstance(said, str):
                    said = json.dumps(said, default=str, ensure_ascii=False)
                # Half a surrogate pair has no token.
                answers.append(said.encode(errors="replace").decode())
            except Exception as error:
                self.failures += 1
                answers.append(f"Error: {error if isinstance(error, _Fault) else told(error)}")
        self.calls += len(asked)
        messages = [
            {"role": "tool", "name": call.name, "content": answer}
            for call, answer in zip(asked, answers, strict=True)
        ]
        return Observation(messages, done=not asked)


class _Fault(Exception):
    """A fault of a call that is told to the policy as it is."""


def check_template(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]) -> None:
    """Refuse a chat template that cannot show the tools to the model, or tell it their results.

    Raises:
        ValueError: the chat template cannot do one of them.
    """
    chat = [{"role": "user", "content": "?"}]
    if encode(chat, tokenizer, tools=schemas) == encode(chat, tokenizer):
        raise ValueError(
            "tools: the chat template of the tokenizer does not show them to the model: give a "
            "processing_class with one that does"
        )
    result = {"role": "tool", "name": schemas[0]["function"]["name"], "content": "!"}
    try:
        encode_answer([result], tokenizer, chat, None, schemas)
    except ValueError as error:
        raise ValueError(f"tools: what one returns cannot be told to the model: {error}") from error


def _schema(tool: Tool) -> dict[str, Any]:
    if not callable(tool):
        raise ValueError(f"tools must be functions, got {tool!r}")
    name = getattr(tool, "__name__", repr(tool))
    if inspect.ismethod(tool):
        name = f"{type(tool.__self__).__name__}.{name}"
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # it may raise anything
        raise ValueError(
            f"the tool {name} cannot be described to the model: {error}. Give every argument a "
            "type hint and a line under Args: in its docstring"
        ) from error
    return schema


def _tagged(text: str) -> ToolCall:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is no JSON: {error}")


def _call(call: Any) -> ToolCall:
    """Read name and arguments of a call, if it has both."""
    name = call.get("name") if isinstance(call, Mapping) else None
    arguments = call.get("arguments", {}) if isinstance(call, Mapping) else None
    if isinstance(arguments, str):  # some templates leave them so
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall(error='a call needs a "name" and "arguments", an object')
    return ToolCall(name, arguments)
