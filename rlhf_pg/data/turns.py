"""Encode complete chats, and mark the tokens to train on."""

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_pg.boundary.quoted import show
from rlhf_pg.data.chat import spell, tokenize
from rlhf_pg.data.messages import WEIGHTS, Chat, Schemas, normalise, without_weights
from rlhf_pg.data.rendering import (
    QUOTE,
    WORD,
    known_roles,
    last_turn,
    mark_chat,
    prepare,
    render,
    special_tokens,
    template_arguments,
    template_of,
)

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters, end exclusive


def encode_turns(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    read: int = 0,
    assistant_only: bool = False,
    tools: Schemas = (),
    append_eos: bool = True,
) -> tuple[list[int], list[bool]]:
    """Encode a closed chat; return its ids, and the mask of those to train on.

    A turn is trained on through the token that ends it, without the template's whitespace after it.
    The text before a turn of the assistant has the same tokens as in a rollout. The name of a
    special token in a message is only text, as in `rlhf_pg.data.chat.encode`.

    Args:
        read: number of messages at the start that are not trained on, such as the prompt; others
            are not if they have `weight: 0` or `train: false`.
        append_eos: end the chat by the EOS if its template does not end the assistant's last turn.

    Raises:
        ValueError: there is no chat template, the messages do not fit it, words that are trained on
            are not shown, or its turns cannot be separated.
    """
    chat, read = known_roles(normalise(messages, where), tokenizer, where, tools, read)
    learnt = [is_learnt(message, where) for message in chat]
    asked = [n for n, message in enumerate(chat) if message.keys() & {*WEIGHTS} and learnt[n]]
    chat = without_weights(chat)
    spoken = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
    whole_turns = [n for n in spoken if n >= read and learnt[n]]
    shown = prepare(chat, tokenizer, where, tools, whole_turns)
    quoted = shown.messages
    last = len(chat) - 1
    hides_learnt = shown.hides_last and last in whole_turns
    if hides_learnt:
        text = "".join(last_turn(shown, tokenizer, where, tools))
    else:
        text = render(tokenizer, quoted, where, tools=tools)

    def length(count: int, closed: bool) -> int:
        """Return the length of the text up to a message, or up to the opening of its turn."""
        if count == 0:
            return 0
        if count > last:
            return len(text)
        start = render(tokenizer, quoted[:count], where, open_turn=not closed, tools=tools)
        if not text.startswith(start):
            raise ValueError(
                f"{where}: the chat template renders the first {count} messages differently if "
                "more follow, so the policy's words cannot be separated from the rest. Use a "
                "template with {% generation %} tags around the assistant's words and the same "
                "history in every turn (chat_template), or train on all tokens "
                "(assistant_only_loss and completion_only_loss: false)"
            )
        return len(start)

    def turn(number: int) -> Span:
        """Return the span of a turn; the assistant's begins behind its opening."""
        return length(number, closed=number not in spoken), length(number + 1, closed=True)

    start = length(read, closed=False)
    spans = [(start, len(text))]
    template = template_of(tokenizer, tools)
    is_tagged = assistant_only and GENERATION.search(template) and not hides_learnt
    if is_tagged:
        _, spans = _render_blocks(quoted, tokenizer, tools)
    elif assistant_only:
        spans = [turn(n) for n in whole_turns]
    unlearnt = [n for n in range(read, len(chat)) if not learnt[n]]
    left_out: list[Span] | None = None
    if is_tagged and unlearnt:  # these turns need not be told apart
        left_out = _blocks_of(unlearnt, quoted, spans, tokenizer, tools)
    elif assistant_only:
        left_out = []
    if left_out is None:
        left_out = [turn(n) for n in unlearnt]
    if assistant_only:
        spans += [turn(n) for n in asked if n not in spoken]
    learnt_spans = [(max(first, start), len(text[:end].rstrip())) for first, end in spans]
    openings = [start]
    for number in spoken:
        if number > read:
            with suppress(ValueError):  # the template renders this turn differently
                openings.append(length(number, closed=False))
    ids, char_spans = _tokenize_turns(text, openings, tokenizer, where)
    mask = [_overlaps(p, learnt_spans) and not _overlaps(p, left_out) for p in char_spans]
    return _with_ends(ids, mask, tokenizer, assistant_only, append_eos and last in whole_turns)


def _render_blocks(
    quoted: Chat,
    tokenizer: PreTrainedTokenizerBase,
    tools: Schemas,
) -> tuple[str, list[Span]]:
    """Render a chat, and return the spans of its {% generation %} blocks too."""
    [text], [spans] = render_jinja_template(
        [quoted],
        tools=list(tools) or None,
        chat_template=template_of(tokenizer, tools),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **template_arguments(tokenizer)},
    )
    return text, spans


def _blocks_of(
    numbers: Collection[int],
    quoted: Chat,
    spans: Sequence[Span],
    tokenizer: PreTrainedTokenizerBase,
    tools: Schemas,
) -> list[Span] | None:
    """Return the blocks of messages with these numbers; None if a block cannot be attributed.

    A block belongs to the messages of the marked words in it, or else beside it.
    """
    marked, words = mark_chat(quoted)
    text, blocks = _render_blocks(marked, tokenizer, tools)
    if len(blocks) != len(spans):
        return None
    marks = [*WORD.finditer(text)]
    starts = [mark.start() for mark in marks]
    owners = [words[int(mark[1])].message for mark in marks]
    chosen = []
    for span, (first, end) in zip(spans, blocks, strict=True):
        low = bisect_left(starts, first)
        high = bisect_left(starts, end)
        inside = {*owners[low:high]} or {*owners[max(0, low - 1) : high + 1]}
        kinds = {n in numbers for n in inside if quoted[n]["role"] == "assistant"}
        if len(kinds) != 1:
            return None
        if True in kinds:
            chosen.append(span)
    return chosen


def is_learnt(message: Mapping[str, Any], where: str) -> bool:
    """Return whether a message is trained on, by its `weight` (0 or 1) or `train`."""
    values = [message[key] for key in WEIGHTS if key in message]
    for value in values:
        if value not in (0, 1):
            raise ValueError(f"{where}: weight of a message must be 0 or 1, got {show(value)}")
    return all(values)


def _overlaps(span: Span, spans: Sequence[Span]) -> bool:
    return any(span[0] < end and span[1] > first for first, end in spans)


def _with_ends(
    ids: list[int],
    mask: list[bool],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    append_eos: bool,
) -> tuple[list[int], list[bool]]:
    """Teach the end of turns whose template ends them by the next turn's first token, or not at
    all: such turns are followed by a special token, or by the EOS.
    """
    special = special_tokens(tokenizer).ids
    for index, (here, behind) in enumerate(pairwise(ids)):
        is_end = assistant_only and mask[index] and not mask[index + 1]
        if is_end and here not in special and behind in special:
            mask[index + 1] = True
    count = len(mask) - mask[::-1].index(True) if True in mask else 0
    if append_eos and count and ids[count - 1] not in special:
        return [*ids[:count], tokenizer.eos_token_id], [*mask[:count], True]
    return ids, mask


def _tokenize_turns(
    text: str, openings: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered chat, split at an opening only if tokens would change across it.

    It is not always split, since a tokenizer may put a space before every text.
    """
    ids: list[int] = []
    char_spans: list[Span] = []
    begin = 0
    first = 0  # start of the text that is tokenized together, and of its tokens
    for opening, end in pairwise([0, *openings, len(text)]):
        pieces, spans = _tokenize_spans(text[begin:end], tokenizer, where)
        if pieces[: len(ids) - first] != ids[first:]:
            begin = opening
            first = len(ids)
            pieces, spans = _tokenize_spans(text[begin:end], tokenizer, where)
        ids = ids[:first] + pieces
        char_spans = char_spans[:first] + [(begin + a, begin + b) for a, b in spans]
    return ids, char_spans


def _tokenize_spans(
    text: str, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered chat, with the span of characters of each token."""
    ids: list[int] = []
    char_spans: list[Span] = []
    at = 0
    for number, part in enumerate(QUOTE.split(text)):
        if number % 2:  # the number of a special token's name
            pieces = spell(tokenizer, part, where)
            width = len(part) + 2
            spans = [(0, width)] * len(pieces)
        else:
            options = {"add_special_tokens": False, "return_offsets_mapping": True}
            encoded = tokenize(tokenizer, part, where, **options)
            pieces = encoded["input_ids"]
            spans = encoded["offset_mapping"]
            width = len(part)
        ids += pieces
        char_spans += [(at + a, at + b) for a, b in spans]
        at += width
    return ids, char_spans
