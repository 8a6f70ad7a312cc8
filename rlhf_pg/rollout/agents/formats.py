"""OpenAI's formats: chat completions, completions and responses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.messages import normalise
from rlhf_pg.rollout.agents.history import Answer

MODEL = "policy"


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with text as content and arguments of calls as objects.

    The name of a participant, which clients may send, is left out: no template shows it.
    """
    if not messages:
        raise ValueError("messages: at least one is needed")
    chat = normalise(messages, "messages")
    for message in chat:
        if message["role"] != "tool":
            message.pop("name", None)
    return chat


def of_items(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of the input of a response."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    chat: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            chat.append({"role": item["role"], "content": item["content"]})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not (chat and chat[-1]["role"] == "assistant"):
                chat.append({"role": "assistant", "content": ""})
            chat[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            chat.append(answer)
        elif kind != "reasoning":
            raise ValueError(f"input: items of type {kind} are not supported")
    return chat


def finish(answer: Answer) -> str:
    if answer.tools:
        return "tool_calls"
    return answer.completion.finish_reason


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    read = len(answers[0].prompt)
    written = sum(len(answer.completion.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def of_chat(
    answers: Sequence[Answer], logprobs: bool, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    choices = []
    for i, answer in enumerate(answers):
        pieces = zip(answer.completion.tokens, answer.completion.logprobs, strict=True)
        content = [
            {"token": text, "logprob": x, "bytes": list(text.encode()), "top_logprobs": []}
            for token, x in pieces
            for text in [tokenizer.decode([token])]
        ]
        choice = {"index": i, "message": answer.message, "finish_reason": finish(answer)}
        choices.append(choice | {"logprobs": {"content": content} if logprobs else None})
    body = {"id": f"chatcmpl-{answers[0].name}", "object": "chat.completion", "created": 0}
    return body | {"model": MODEL, "choices": choices, "usage": usage(answers)}


def chat_chunks(body: dict[str, Any], usage: bool) -> Iterator[dict[str, Any] | None]:
    """Yield a chat completion as the chunks of a stream, with its usage if that was asked for."""
    for choice in body["choices"]:
        calls = choice["message"].get("tool_calls", ())
        calls = [{"index": i, **call} for i, call in enumerate(calls)]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            one = {"index": choice["index"], "delta": part, "finish_reason": reason}
            one["logprobs"] = choice["logprobs"] if part else None
            yield body | {"object": "chat.completion.chunk", "choices": [one], "usage": None}
    if usage:
        yield body | {"object": "chat.completion.chunk", "choices": []}
    yield None


def of_text(
    answers: Sequence[Answer], logprobs: bool, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    choices = []
    for i, answer in enumerate(answers):
        tokens = [tokenizer.decode([token]) for token in answer.completion.tokens]
        known: dict[str, Any] = {"tokens": tokens, "top_logprobs": None, "text_offset": None}
        known["token_logprobs"] = answer.completion.logprobs
        choice = {"index": i, "text": answer.content, "finish_reason": finish(answer)}
        choices.append(choice | {"logprobs": known if logprobs else None})
    body = {"id": f"cmpl-{answers[0].name}", "object": "text_completion", "created": 0}
    return body | {"model": MODEL, "choices": choices, "usage": usage(answers)}


def of_response(answer: Answer) -> dict[str, Any]:
    said = answer.message
    output = list[dict[str, Any]]()
    if said["content"] is not None:
        text = {"type": "output_text", "text": said["content"], "annotations": []}
        item = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant"}
        output.append(item | {"status": "completed", "content": [text]})
    for call in said.get("tool_calls", ()):
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        output.append(item | {"status": "completed", **call["function"]})
    count = usage([answer])
    cut = answer.completion.finish_reason == "length"
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": MODEL,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": count["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": count["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": count["total_tokens"],
        },
    }


def response_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a response as the events of a stream."""
    found: list[dict[str, Any]] = []
    begun = body | {"status": "in_progress", "output": [], "usage": None}
    found.append({"type": "response.created", "response": begun})
    for i, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": i}
        new = item | ({"content": []} if "content" in item else {})
        found.append({"type": "response.output_item.added", "output_index": i, "item": new})
        if item["type"] == "message":
            [part] = item["content"]
            text = place | {"content_index": 0}
            empty = part | {"text": ""}
            words = part["text"]
            found.append({"type": "response.content_part.added", **text, "part": empty})
            more = text | {"logprobs": []}
            found.append({"type": "response.output_text.delta", **more, "delta": words})
            found.append({"type": "response.output_text.done", **more, "text": words})
            found.append({"type": "response.content_part.done", **text, "part": part})
        else:
            call = place | {"arguments": item["arguments"], "name": item["name"]}
            found.append({"type": "response.function_call_arguments.done", **call})
        found.append({"type": "response.output_item.done", "output_index": i, "item": item})
    found.append({"type": f"response.{body['status']}", "response": body})
    for number, event in enumerate(found):
        yield event | {"sequence_number": number}
