"""OpenAI's formats: chat completions, completions and responses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.agents.history import Json, PolicyAnswer
from rlhf_pg.data.messages import normalise
from rlhf_pg.rollout.engine import Completion

MODEL = "policy"


def plain(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
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


def of_items(items: str | Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of the input of a response."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    chat: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            chat.append({"role": item["role"], "content": item["content"]})
        elif kind == "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {
                    "name": item["name"],
                    "arguments": item["arguments"],
                },
            }
            if not (chat and chat[-1]["role"] == "assistant"):
                chat.append({"role": "assistant", "content": ""})
            chat[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = {
                "role": "tool",
                "content": item["output"],
                "tool_call_id": item["call_id"],
            }
            chat.append(answer)
        elif kind != "reasoning":
            raise ValueError(f"input: items of type {kind} are not supported")
    return chat


def finish(answer: PolicyAnswer) -> str:
    if answer.tools:
        return "tool_calls"
    return answer.completion.finish_reason


def usage(answers: Sequence[PolicyAnswer]) -> dict[str, int]:
    read = len(answers[0].prompt)
    written = sum(len(answer.completion.tokens) for answer in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def of_chat(
    answers: Sequence[PolicyAnswer],
    logprobs: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> Json:
    choices = []
    for i, answer in enumerate(answers):
        choice = {
            "index": i,
            "message": answer.message,
            "finish_reason": finish(answer),
            "logprobs": None,
        }
        if logprobs:
            choice["logprobs"] = {"content": _token_logprobs(answer.completion, tokenizer)}
        choices.append(choice)
    return {
        "id": f"chatcmpl-{answers[0].name}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": choices,
        "usage": usage(answers),
    }


def _token_logprobs(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    content = []
    for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
        text = tokenizer.decode([token])
        scored = {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        content.append(scored)
    return content


def chat_chunks(body: Json, usage: bool) -> Iterator[Json | None]:
    """Yield a chat completion as the chunks of a stream, with its usage if that was asked for."""
    chunk = body | {"object": "chat.completion.chunk"}
    for choice in body["choices"]:
        delta = choice["message"]
        if "tool_calls" in delta:
            calls = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
            delta = delta | {"tool_calls": calls}
        words = {
            "index": choice["index"],
            "delta": delta,
            "finish_reason": None,
            "logprobs": choice["logprobs"],
        }
        end = words | {
            "delta": {},
            "finish_reason": choice["finish_reason"],
            "logprobs": None,
        }
        for part in (words, end):
            yield chunk | {"choices": [part], "usage": None}
    if usage:
        yield chunk | {"choices": []}
    yield None


def of_text(
    answers: Sequence[PolicyAnswer],
    logprobs: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> Json:
    choices = []
    for i, answer in enumerate(answers):
        choice = {
            "index": i,
            "text": answer.content,
            "finish_reason": finish(answer),
            "logprobs": None,
        }
        if logprobs:
            choice["logprobs"] = {
                "tokens": [tokenizer.decode([token]) for token in answer.completion.tokens],
                "top_logprobs": None,
                "text_offset": None,
                "token_logprobs": answer.completion.logprobs,
            }
        choices.append(choice)
    return {
        "id": f"cmpl-{answers[0].name}",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": choices,
        "usage": usage(answers),
    }


def of_response(answer: PolicyAnswer) -> Json:
    message = answer.message
    output = list[Json]()
    if message["content"] is not None:
        text = {
            "type": "output_text",
            "text": message["content"],
            "annotations": [],
        }
        item = {
            "type": "message",
            "id": f"msg_{answer.name}",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        output.append(item)
    for call in message.get("tool_calls", ()):
        item = {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        output.append(item)
    count = usage([answer])
    is_cut = answer.completion.finish_reason == "length"
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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


def response_events(body: Json) -> Iterator[Json]:
    """Yield a response as the events of a stream."""
    for number, event in enumerate(_events(body)):
        yield event | {"sequence_number": number}


def _events(body: Json) -> Iterator[Json]:
    begun = body | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for i, item in enumerate(body["output"]):
        address = {"item_id": item["id"], "output_index": i}
        new = item | {"content": []} if "content" in item else item
        yield {"type": "response.output_item.added", "output_index": i, "item": new}
        if item["type"] == "message":
            [part] = item["content"]
            address["content_index"] = 0
            empty = part | {"text": ""}
            words = part["text"]
            text = address | {"logprobs": []}
            yield {"type": "response.content_part.added", **address, "part": empty}
            yield {"type": "response.output_text.delta", **text, "delta": words}
            yield {"type": "response.output_text.done", **text, "text": words}
            yield {"type": "response.content_part.done", **address, "part": part}
        else:
            yield {
                "type": "response.function_call_arguments.done",
                **address,
                "arguments": item["arguments"],
                "name": item["name"],
            }
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}
