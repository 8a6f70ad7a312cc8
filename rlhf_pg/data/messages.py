"""Chat messages in one normal form, whatever form the data have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.quoted import show

# ShareGPT's names of roles.
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}
Message = dict[str, Any]
Chat = list[Message]
Schemas = Sequence[dict[str, Any]]  # schemas of functions

# Fields of a message in which templates look for the assistant's thoughts.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# What SFT learns of a message.
WEIGHTS = ("weight", "train")
# Kinds of parts with text, in OpenAI's interfaces.
TEXT_PARTS = ("text", "input_text", "output_text")
TEXT_FIELDS = {"type", "text", "annotations", "logprobs"}


class Arguments(dict[str, Any]):
    """Arguments of a call, whose nulls are the call's own."""


def normalise(messages: Any, where: str) -> Chat:
    """Return messages in OpenAI's form, with text as content and objects as arguments of calls.

    ShareGPT's `from` and `value` become role and content; parts that are all text become one text;
    nulls, which Arrow adds since all rows of a table have one type, go. For example

        {"from": "human", "value": "2+2?"}  ->  {"role": "user", "content": "2+2?"}

    ValueError, with the message and its role, for parts of other kinds, content that is not text,
    and calls that cannot be read.
    """
    is_chat = isinstance(messages, list | tuple) and len(messages) > 0
    if not is_chat or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{where} must be a string or a list of messages, got {show(messages)}")
    return [_normal(message, number, where) for number, message in enumerate(messages)]


def storable(messages: Any, where: str) -> Chat:
    """Return messages in normal form, with arguments as JSON text: a table, whose columns have one
    type, would change their types, nulls and order.
    """
    return _with_json(normalise(_with_json(messages), where))  # type: ignore[no-any-return]


def _with_json(value: Any, key: str = "") -> Any:
    if key == "arguments" and isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return [_with_json(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _with_json(item, name) for name, item in value.items()}
    return value


def read_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Return the schemas of functions, from a list or its JSON text; ValueError for another."""
    if isinstance(tools, str):
        tools = _read_json(tools or "[]", where)
    if tools and not isinstance(tools, list | tuple):
        tools = [tools]
    schemas = []
    for tool in without_nulls(tools or []):
        function = _function_of(tool)
        if function is None:
            raise ValueError(f"{where} must be schemas of functions with names, got {show(tool)}")
        if "input_schema" in function:  # Anthropic's name
            function = dict(function)
            function["parameters"] = function.pop("input_schema")
        schemas.append({"type": "function", "function": function})
    return schemas


def _function_of(value: Any) -> Any:
    """Return the function of a tool or a call, which may be bare; None if it has no name."""
    if not isinstance(value, Mapping):
        return None
    function = value.get("function", value)
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return function
    return None


def without_nulls(value: Any) -> Any:
    """Copy a value without the nulls in its mappings; `Arguments`, read from JSON, keep theirs."""
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    if isinstance(value, Mapping) and not isinstance(value, Arguments):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def without_weights(chat: Chat) -> Chat:
    """Return messages without what says whether SFT learns them."""
    chat = [message.copy() for message in chat]
    for message in chat:
        for key in WEIGHTS:
            message.pop(key, None)
    return chat


def _normal(raw: Mapping[str, Any], number: int, where: str) -> Message:
    message: Message = without_nulls(raw)
    if "from" in message and "role" not in message:
        message = of_sharegpt(message, f"{where}: message {number}")
    role = message.get("role")
    where = f"{where}: message {number} ({role})"
    if not isinstance(role, str):
        raise ValueError(f"{where} has no role, but the keys {', '.join(message)}")
    calls = message.pop("tool_calls", None) or []
    if "function_call" in message:  # OpenAI's older form of calls, and of their results
        calls = [message.pop("function_call")]
    if role == "function":
        role = "tool"
    if "content" not in message and not calls and not any(key in message for key in THOUGHTS):
        raise ValueError(f"{where} has no content, but the keys {', '.join(message)}")
    fields = [key for key in THOUGHTS if message.get(key)]
    for key in fields[1:]:  # some servers write both names
        if message.pop(key) != message[fields[0]]:
            raise ValueError(
                f"{where}: {fields[0]} and {key} differ: give the thoughts in one of them"
            )
    message["content"] = _text_of_parts(message.get("content", ""), where)
    if calls:
        message["tool_calls"] = [_call(call, where) for call in calls]
    return {**message, "role": role}


def of_sharegpt(message: Mapping[str, Any], where: str) -> Message:
    """Return a message with `from` and `value` in OpenAI's form; ValueError for another role."""
    message = dict(message)
    speaker = message.pop("from")
    if speaker not in SHAREGPT:
        raise ValueError(f"{where}: from must be one of {', '.join(SHAREGPT)}, got {show(speaker)}")
    content = message.pop("value", None)
    if speaker == "function_call":
        calls = _read_json(content, where)
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    elif content is not None:
        message["content"] = content
    return {"role": SHAREGPT[speaker], **message}


def _text_of_parts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be text, got {show(content)}")
    texts = []
    for part in content:
        fields = {"text": part} if isinstance(part, str) else part
        if not _is_text(fields):
            raise ValueError(
                f"{where}: a part of the content is not text: {show(part)}. Models read only text "
                "here: take the part out, or the row"
            )
        texts.append(fields["text"])
    return "".join(texts)


def _is_text(part: Any) -> bool:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    fields = {key for key, value in part.items() if value}
    return fields <= TEXT_FIELDS and part.get("type", "text") in TEXT_PARTS


def _call(call: Any, where: str) -> dict[str, Any]:
    function = _function_of(call)
    if function is None:
        raise ValueError(f"{where}: a call needs a function with a name, got {show(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _read_json(arguments or "{}", where)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: arguments of a call must be an object, got {show(arguments)}")
    made: dict[str, Any] = {"type": "function"}
    if function is not call:
        made |= call
    made["function"] = {**function, "arguments": Arguments(arguments)}
    return made


def _read_json(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} has invalid JSON, {show(text)}: {error}") from error
