"""Whole chats as token ids, with the tokens that a model is to learn from them."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_pg.data.chat import QUOTE, quoted_chat, rendered, spelled, template_arguments, tokenized

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters from a first one to one behind the last


class Learnt(NamedTuple):
    """A text as token ids, and which of them are learnt."""

    ids: list[int]
    mask: list[bool]


def encode_turns(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    read: int = 0,
    assistant_only: bool = False,
) -> Learnt:
    """Encode a closed chat, and say which tokens are learnt.

    A turn is learnt through the token that ends it, without the blanks that a template puts behind
    it. What comes before a turn of the assistant has the tokens that a rollout gives it. The name
    of a special token in a message is only text, as in `rlhf_pg.data.chat.encode`.

    Args:
        read: number of messages at the start that are only read, as the prompt is.

    Raises:
        ValueError: there is no chat template, the messages do not fit it, or its turns cannot be
            told apart.
    """
    quoted = quoted_chat(list(messages), tokenizer, where)
    whole = rendered(tokenizer, quoted, where)

    def length(count: int, closed: bool) -> int:
        """Return how long the text is up to a message, or else up to the assistant's turn there."""
        if count == 0 and not closed:
            return 0
        text = rendered(tokenizer, quoted[:count], where, open_turn=not closed)
        if not whole.startswith(text):
            raise ValueError(
                f"{where}: the chat template renders the first {count} messages differently once "
                "others follow, so what a policy would have read and said cannot be told apart. "
                "Take a template with {% generation %} tags around the assistant's words and the "
                "same history in every turn, or learn all tokens (assistant_only_loss and "
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
            with suppress(ValueError):  # a turn that the template shows differently
                openings.append(length(number, closed=False))
    ids, places = _tokenize_turns(whole, openings, tokenizer, where)
    mask = [any(first < stop and end > begin for begin, stop in learnt) for first, end in places]
    return Learnt(ids, mask)


def _tokenize_turns(
    text: str, openings: Sequence[int], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[Span]]:
    """Tokenize a rendered chat as one, or apart at an opening that it would melt with what follows.

    A tokenizer may put a blank in front of every text, so it is not always cut.
    """
    ids: list[int] = []
    places: list[Span] = []
    begin, first = 0, 0  # of the text that is tokenized as one, and of its tokens
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
    """Tokenize a rendered chat, with the characters that each token stands for."""
    ids: list[int] = []
    places: list[Span] = []
    at = 0
    for number, part in enumerate(QUOTE.split(text)):
        if number % 2:  # the number of a special token's name
            pieces, width = spelled(tokenizer, part, where), len(part) + 2
            spans = [(0, width)] * len(pieces)
        else:
            options = {"add_special_tokens": False, "return_offsets_mapping": True}
            encoded = tokenized(tokenizer, part, where, **options)
            pieces, spans, width = encoded["input_ids"], encoded["offset_mapping"], len(part)
        ids += pieces
        places += [(at + a, at + b) for a, b in spans]
        at += width
    return ids, places
