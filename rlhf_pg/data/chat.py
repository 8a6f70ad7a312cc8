"""Encode text and chat messages; no message can forge a special token."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import show, tell

# Marks the end of the assistant's words in a rendered chat: private characters, no whitespace.
MARK = "\ue000\ue001\ue002"
# Replaces the name of a special token in a message by its number.
QUOTE = re.compile("\ue003([0-9]+)\ue004")
# Roles are not quoted, since templates compare them, even if a special token has the same name.
ROLES = ("system", "developer", "user", "assistant", "tool")
# The tokenizer's attribute that `set_template_arguments` sets.
ARGUMENTS = "chat_template_kwargs"


def set_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> None:
    setattr(tokenizer, ARGUMENTS, dict(arguments))


def template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return getattr(tokenizer, ARGUMENTS, None) or {}


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the vocabulary, special tokens and chat template."""
    parts = (tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def encode(
    text: Any,
    tokenizer: PreTrainedTokenizerBase,
    row: int = 0,
    what: str = "prompt",
    open_turn: bool = True,
    tools: Sequence[dict[str, Any]] = (),
    most: int | None = None,
) -> list[int]:
    """Encode a string or chat messages as token ids.

    A BOS from both the text and the tokenizer is kept once. The name of a special token becomes
    that token in a string, which may be a rendered chat, but is only text in a message.

    Args:
        row, what: name the text in errors.
        open_turn: leave a chat open for the assistant to continue, after the opening of its turn
            or after its own last words; otherwise the chat is closed.

    Raises:
        ValueError: the text cannot be encoded, or has more than `most` tokens.
    """
    where = f"{what} in row {row}"
    if isinstance(text, str):
        ids = tokenize(tokenizer, text, where, add_special_tokens=True)["input_ids"]
    elif isinstance(text, list) and text and isinstance(text[0], dict):
        quoted = quote_chat(_without_nulls(text), tokenizer, where)
        if open_turn and continues(text):
            quoted[-1] = _mark(quoted[-1])
            chat = _around_mark(render(tokenizer, quoted, where, False, tools))[0]
        else:
            chat = render(tokenizer, quoted, where, open_turn, tools)
        ids = tokenize_chat(tokenizer, chat, where)
    else:
        raise ValueError(f"{where} must be a string or a list of messages, got {show(text)}")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    if not ids:
        raise ValueError(f"{where} is empty: a model needs at least one token")
    if most is not None and len(ids) > most:
        raise ValueError(f"{where} is too long: {len(ids)} tokens, for at most {most}")
    return ids


def encode_answer(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    stop_id: int | None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Encode the answer to an assistant's turn, through the opening of its next turn.

    Args:
        messages: plain text; or chat messages, to which the chat template adds everything between
            two turns of the assistant.
        stop_id: the token that ended the turn, if any; it is not encoded again.

    Raises:
        ValueError: the messages do not fit the chat template, or it drops the assistant's turn.
    """
    where = "the answer to a turn"
    if isinstance(messages, str):
        return tokenize(tokenizer, messages, where, add_special_tokens=False)["input_ids"]
    said = quote_chat(list(prompt), tokenizer, where)
    turn = said.pop() if continues(prompt) else {"role": "assistant", "content": ""}
    told = quote_chat(list(messages), tokenizer, where)
    chat = render(tokenizer, [*said, _mark(turn), *told], where, True, tools)
    text = _around_mark(chat)[1]
    if stop_id is not None:
        blank, stop, rest = text.partition(tokenizer.decode([stop_id]))
        if stop and not blank.strip():  # some templates have whitespace before it
            text = rest
    return tokenize_chat(tokenizer, text, where)


def continues(prompt: Any) -> bool:
    """Return whether a prompt ends with an assistant message, which the policy continues."""
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return False
    return isinstance(last.get("content"), str | list) and not last.get("tool_calls")


def whole_turn(prompt: Any, messages: list[Any]) -> tuple[Any, list[Any]]:
    """Return a prompt and its messages with complete turns, like TRL: if the policy continued an
    assistant message at the end of the prompt, that text moves to the first message.
    """
    if not messages or not continues(prompt):
        return prompt, messages
    first = {**messages[0], "content": text_of(prompt[-1]) + messages[0]["content"]}
    return prompt[:-1], [first, *messages[1:]]


def last_text(said: Any) -> str:
    """Return a text, or that of the last message of a chat; "" if it has none."""
    return said if isinstance(said, str) else text_of(said[-1]) if said else ""


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or the texts of its parts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _mark(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with MARK after its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    return {**message, "content": [*content, {"type": "text", "text": MARK}]}


def _around_mark(chat: str) -> tuple[str, str]:
    before, mark, after = chat.rpartition(MARK)
    if not mark:
        raise ValueError("the chat template does not show the assistant's last message")
    return before, after


def quote_chat(messages: list[Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[Any]:
    """Quote chat messages for `render`."""
    try:
        quoted: list[Any] = _quote(messages, _vocabulary(tokenizer, len(tokenizer)))
    except Exception as error:
        raise ValueError(f"{where} cannot be read: {tell(error)}") from error
    return quoted


def render(
    tokenizer: PreTrainedTokenizerBase,
    quoted: list[Any],
    where: str,
    open_turn: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """Render quoted chat messages with the chat template, for `tokenize_chat`."""
    if not tokenizer.chat_template:
        raise ValueError(f"{where} is a list of messages, but the tokenizer has no chat_template")
    try:
        chat: str = tokenizer.apply_chat_template(
            quoted,
            tools=list(tools) or None,
            add_generation_prompt=open_turn,
            tokenize=False,
            **template_arguments(tokenizer),
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(f"{where} does not fit the chat template: {tell(error)}") from error
    return chat


class _Vocabulary(NamedTuple):
    """The special tokens of a tokenizer."""

    names: list[str]  # a `QUOTE` has an index of this list
    found: re.Pattern[str]  # any of the names
    ids: set[int]


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> _Vocabulary:
    """Return a tokenizer's special tokens; `size` renews the cache when tokens are added."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Longer names come before their prefixes. Marks and quotes in a text are quoted too.
    names = sorted({*added.values(), MARK[0], "\ue003"}, reverse=True)
    found = re.compile("|".join(map(re.escape, names)))
    return _Vocabulary(names, found, set(added))


def _without_nulls(value: Any) -> Any:
    """Copy messages without the nulls that Arrow adds, since all rows of a table have one type."""
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return value


def _quote(value: Any, special: _Vocabulary) -> Any:
    """Copy messages with a `QUOTE` in place of every special token's name."""
    if isinstance(value, list | tuple):
        return [_quote(item, special) for item in value]
    if isinstance(value, Mapping):
        return {
            _quote(k, special): v if k == "role" and v in ROLES else _quote(v, special)
            for k, v in value.items()
        }
    if value is not None and not isinstance(value, str | int | float):
        value = str(value)  # as a template would render it
    if isinstance(value, str):
        return special.found.sub(
            lambda match: f"\ue003{special.names.index(match.group())}\ue004", value
        )
    return value


def tokenize_chat(tokenizer: PreTrainedTokenizerBase, chat: str, where: str) -> list[int]:
    """Tokenize a rendered chat; a `QUOTE` becomes the letters of the name."""
    first, *rest = QUOTE.split(chat)
    ids = tokenize(tokenizer, first, where, add_special_tokens=False)["input_ids"]
    for number, text in zip(rest[::2], rest[1::2], strict=True):
        ids += spell(tokenizer, number, where)
        ids += tokenize(tokenizer, text, where, add_special_tokens=False)["input_ids"]
    return ids


def spell(tokenizer: PreTrainedTokenizerBase, number: str, where: str) -> list[int]:
    """Return ids that spell the name with this number without using special tokens."""
    vocabulary = _vocabulary(tokenizer, len(tokenizer))
    name = vocabulary.names[int(number)]
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    ids = tokenize(tokenizer, name, where, **plain)["input_ids"]
    if vocabulary.ids & set(ids):  # some vocabularies have the name as a piece
        letters = [tokenize(tokenizer, letter, where, **plain) for letter in name]
        ids = [i for letter in letters for i in letter["input_ids"]]
    return ids


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, **options: bool
) -> dict[str, list[Any]]:
    """Tokenize a text: return "input_ids" and other entries by the options."""
    try:
        encoded: dict[str, list[Any]] = tokenizer(text, **options)
    except Exception as error:  # a character without a token, or a slow tokenizer
        raise ValueError(f"{where} cannot be tokenized: {tell(error)}") from error
    return encoded
