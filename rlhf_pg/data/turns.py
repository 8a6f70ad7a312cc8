"""Encode complete chats, and mark the tokens to train on."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_pg.data.chat import QUOTE, quote_chat, render, spell, template_arguments, tokenize

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters, end exclusive


def encode_turns(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    read: int = 0,
    assistant_only: bool = False,
) -> tuple[list[int], list[bool]]:
    """Encode a closed chat; return its ids, and the mask of those to train on.

    A turn is trained on through the token that ends it, without the template's whitespace after it.
    The text before a turn of the assistant has the same tokens as in a rollout. The name of a
    special token in a message is only text, as in `rlhf_pg.data.chat.encode`.

    Args:
        read: number of messages at the start that are not trained on, such as the prompt.

    Raises:
        ValueError: there is no chat template, the messages do not fit it, or its turns cannot be
            separated.
    """
    quoted = quote_chat(list(messages), tokenizer, where)
    whole = render(tokenizer, quoted, where)

    def length(count: int, closed: bool) -> int:
        """Return the length of the text up to a message, or up to the opening of its turn."""
        if count == 0 and not closed:
            return 0
        text = render(tokenizer, quoted[:count], where, open_turn=not closed)
        if not whole.startswith(text):
            raise ValueError(
                f"{where}: the chat template renders the first {count} messages differently if "
                "more follow, so the policy's words cannot be separated from the rest. Use a "
                "template with {% generation %} tags around the assistant's words and the same "
                "history in every turn, or train on all tokens (assistant_only_loss and "
                "completion_only_loss: false)"
            )
        return len(text)

    spoken = [n for n, said in enumerate(quoted) if said.get("role") == "assistant"]
    start = length(read, closed=False)
    spans = [(start, len(whole))]
    template = tokenizer.get_chat_template()
    if assistant_only and GENERATION.search(template):
        names = {**tokenizer.special_tokens_map, **template_arguments(tokenizer)}
        _, [spans] = render_jinja_template(
            [quoted], chat_template=template, return_assistant_tokens_mask=True, **names
        )
    elif assistant_only:
        spans = [(length(n, closed=False), length(n + 1, closed=True)) for n in spoken]
    learnt = [(max(first, start), len(whole[:end].rstrip())) for first, end in spans]
    openings = [start]
    for number in spoken:
        if number > read:
            with suppress(ValueError):  # the template renders this turn differently
                openings.append(length(number, closed=False))
    ids, places = _tokenize_turns(whole, openings, tokenizer, where)
    mask = [any(first < stop and end > begin for begin, stop in learnt) for first, end in places]
    return ids, mask


def _tokenize_turns(
    text: str, openings: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered chat, split at an opening only if tokens would change across it.

    It is not always split, since a tokenizer may put a space before every text.
    """
    ids: list[int] = []
    places: list[Span] = []
    begin, first = 0, 0  # start of the text that is tokenized together, and of its tokens
    for opening, end in pairwise([0, *openings, len(text)]):
        more, spans = _tokenize_places(text[begin:end], tokenizer, where)
        if more[: len(ids) - first] != ids[first:]:
            begin, first = opening, len(ids)
            more, spans = _tokenize_places(text[begin:end], tokenizer, where)
        ids = ids[:first] + more
        places = places[:first] + [(begin + a, begin + b) for a, b in spans]
    return ids, places


def _tokenize_places(
    text: str, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered chat, with the span of characters of each token."""
    ids: list[int] = []
    places: list[Span] = []
    at = 0
    for number, part in enumerate(QUOTE.split(text)):
        if number % 2:  # the number of a special token's name
            pieces, width = spell(tokenizer, part, where), len(part) + 2
            spans = [(0, width)] * len(pieces)
        else:
            options = {"add_special_tokens": False, "return_offsets_mapping": True}
            encoded = tokenize(tokenizer, part, where, **options)
            pieces, spans, width = encoded["input_ids"], encoded["offset_mapping"], len(part)
        ids += pieces
        places += [(at + a, at + b) for a, b in spans]
        at += width
    return ids, places
