"""Encode text and chat messages; no message can forge a special token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import tell
from rlhf_pg.data.messages import Schemas, normalise
from rlhf_pg.data.rendering import (
    MARK,
    QUOTE,
    known_roles,
    last_turn,
    prepare,
    render,
    set_template as set_template,
    set_template_arguments as set_template_arguments,
    special_tokens,
    text_of as text_of,
    turn_ends,
    with_mark,
)


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the vocabulary, special tokens and chat template."""
    parts = (tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template)
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(
    text: Any,
    tokenizer: PreTrainedTokenizerBase,
    row: int = 0,
    what: str = "prompt",
    open_turn: bool = True,
    tools: Schemas = (),
    most: int | None = None,
) -> list[int]:
    """Encode a string or chat messages as token ids.

    A BOS from both the text and the tokenizer is kept once, and no token behind the text that the
    tokenizer alone adds. The name of a special token becomes that token in a string, which may be a
    rendered chat, but is only text in a message.

    Args:
        row, what: name the text in errors.
        open_turn: leave a chat open for the assistant to continue, after the opening of its turn
            or after its own last words; otherwise the chat is closed.

    Raises:
        ValueError: the text cannot be encoded, the chat template does not show all of it, or it has
            more than `most` tokens.
    """
    where = f"{what} in row {row}"
    if isinstance(text, str):
        ids = _encode_text(text, tokenizer, where)
    else:
        chat = render_chat(text, tokenizer, where, open_turn, tools)
        ids = tokenize_chat(tokenizer, chat, where)
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    if not ids:
        raise ValueError(f"{where} is empty: a model needs at least one token")
    if most is not None and len(ids) > most:
        raise ValueError(f"{where} is too long: {len(ids)} tokens, for at most {most}")
    return ids


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    ids = tokenize(tokenizer, text, where, add_special_tokens=True)["input_ids"]
    if not ids or ids[-1] not in special_tokens(tokenizer).ids:
        return ids
    # The last token may be of the text, or one that the tokenizer puts behind every text.
    bare = tokenize(tokenizer, text, where, add_special_tokens=False)["input_ids"]
    if not bare:
        return ids[:1] if ids[0] == tokenizer.bos_token_id else []
    for end in range(len(ids), 0, -1):
        if ids[:end][-len(bare) :] == bare:
            return ids[:end]
    return ids


def render_chat(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    open_turn: bool = True,
    tools: Schemas = (),
) -> str:
    """Return a chat as text for `tokenize_chat`; see `encode`."""
    chat, _ = known_roles(normalise(messages, where), tokenizer, where, tools)
    is_continued = open_turn and continues(chat)
    learnt = [len(chat) - 1] if is_continued or not open_turn else []
    shown = prepare(chat, tokenizer, where, tools, learnt)
    if is_continued or shown.hides_last:
        text, end = last_turn(shown, tokenizer, where, tools)
        return text if open_turn else text + end
    return render(tokenizer, shown.messages, where, open_turn, tools)


def encode_answer(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    stop_id: int | None,
    tools: Schemas = (),
) -> list[int]:
    """Encode the answer to an assistant's turn, through the opening of its next turn.

    Args:
        messages: plain text; or chat messages, to which the chat template adds everything between
            two turns of the assistant.
        stop_id: the token that ended the turn, if any: it is not encoded again, nor another with
            which the template ends a turn.

    Raises:
        ValueError: the messages do not fit the chat template, or it drops the assistant's turn.
    """
    where = "the answer to a turn"
    if isinstance(messages, str):
        return tokenize(tokenizer, messages, where, add_special_tokens=False)["input_ids"]
    before = [*prompt]
    turn = before.pop() if continues(before) else {"role": "assistant", "content": ""}
    chat = normalise([*before, turn, *messages], where)
    chat, index = known_roles(chat, tokenizer, where, tools, len(before))
    shown = prepare(chat, tokenizer, where, tools).messages
    shown[index] = with_mark(shown[index])
    _, mark, text = render(tokenizer, shown, where, True, tools).rpartition(MARK)
    if not mark:
        raise ValueError("the chat template does not show the assistant's last message")
    special = special_tokens(tokenizer)
    after_space = text.lstrip()
    end = special.found.match(after_space)
    if stop_id is not None and end is not None:
        is_stop = end.group() == tokenizer.decode([stop_id])
        if is_stop or (stop_id in special.ids and turn_ends(tokenizer)):
            text = after_space[end.end() :]
    return tokenize_chat(tokenizer, text, where)


def text_of_completion(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    skip_special_tokens: bool,
    stop_token_ids: Sequence[int],
) -> str:
    """Return a completion as rewards see it: with special tokens, but not the one that ended it, or
    without any.
    """
    if not skip_special_tokens and ids and ids[-1] in stop_token_ids:
        ids = ids[:-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


def continues(prompt: Any) -> bool:
    """Return whether a prompt ends with an assistant message, which the policy continues."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    last = prompt[-1]
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return False
    return isinstance(last.get("content"), str | list) and not last.get("tool_calls")


def whole_turn(prompt: Any, messages: list[Any]) -> tuple[Any, list[Any]]:
    """Return a prompt and its messages with complete turns, like TRL: if the policy continued an
    assistant message at the end of the prompt, that text moves to the first message.
    """
    if not messages or not continues(prompt):
        return prompt, messages
    first, *others = messages
    content = text_of(prompt[-1]) + first["content"]
    return prompt[:-1], [{**first, "content": content}, *others]


def last_text(chat: Any) -> str:
    """Return a text, or that of the last message of a chat; "" if it has none."""
    if isinstance(chat, str):
        return chat
    return text_of(chat[-1]) if chat else ""


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
    special = special_tokens(tokenizer)
    name = special.names[int(number)]
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    ids = tokenize(tokenizer, name, where, **plain)["input_ids"]
    if special.ids & set(ids):  # some vocabularies have the name as a piece
        ids = []
        for letter in name:
            ids += tokenize(tokenizer, letter, where, **plain)["input_ids"]
    return ids


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    where: str,
    **options: bool,
) -> dict[str, list[Any]]:
    """Tokenize a text: return "input_ids" and other entries by the options."""
    try:
        encoded: dict[str, list[Any]] = tokenizer(text, **options)
    except Exception as error:  # a character without a token, or a slow tokenizer
        raise ValueError(f"{where} cannot be tokenized: {tell(error)}") from error
    return encoded
