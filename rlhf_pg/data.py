"""Prompts: checked and tokenized once, drawn in an order that a single number resumes."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# What an assistant says where only what follows it is wanted: of no language, with no blanks.
MARK = "\ue000\ue001\ue002"
# Around the number of a special token's name that is only text.
QUOTE = re.compile("\ue003([0-9]+)\ue004")
# What templates compare a role with, even where a special token has the same name.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompts:
    """A dataset whose `prompt` column has been tokenized."""

    rows: Dataset
    tokens: list[list[int]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and of all columns, row by row: a resumed run needs the same."""
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(f"{tokens}\n".encode())
        for table in self.rows.with_format("arrow").iter(1000):  # as stored: nothing is decoded
            for row in table.to_pylist():
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        return digest.hexdigest()


def load_prompts(
    dataset: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int | None = None,
    long_prompts: str = "error",
    tools: Sequence[dict[str, Any]] = (),
) -> Prompts:
    """Tokenize every prompt and apply the length rule.

    Args:
        dataset: has a column `prompt` of strings or of lists of chat messages.
        max_prompt_length: in tokens.
        long_prompts: "error" refuses a longer prompt; "drop" leaves it out and logs how many.
        tools: schemas of the functions that the chats may call.

    Raises:
        ValueError: no `prompt` column, no rows, an empty or a too long prompt (the row is named).
    """
    if dataset is None:
        raise ValueError("there is none: give a datasets.Dataset with a column 'prompt'")
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"expected a datasets.Dataset, got {type(dataset).__name__}: take one split, or make "
            "one with Dataset.from_list"
        )
    shape = dataset.format
    if shape["type"] in ("arrow", "pandas", "polars") or "prompt" not in shape["columns"]:
        dataset = dataset.with_format(None)  # of tables, or without the prompt: rows are needed
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"the dataset has no column 'prompt' (it has {', '.join(dataset.column_names)}): "
            "rename the one that holds the prompts"
        )
    tokens = [
        encode(prompt, tokenizer, row, tools=tools) for row, prompt in enumerate(dataset["prompt"])
    ]
    long = [
        row for row, ids in enumerate(tokens) if max_prompt_length and len(ids) > max_prompt_length
    ]
    if long and long_prompts == "error":
        raise ValueError(
            f"{len(long)} prompts are longer than max_prompt_length {max_prompt_length}; the first "
            f"is row {long[0]} with {len(tokens[long[0]])} tokens. Raise max_prompt_length, "
            "shorten them, or set long_prompts to drop"
        )
    if long:
        logger.warning("dropped %d of %d prompts: too long", len(long), len(tokens))
        kept = sorted(set(range(len(tokens))) - set(long))
        dataset, tokens = dataset.select(kept), [tokens[row] for row in kept]
    if not tokens:
        raise ValueError(
            "the dataset has no prompts" + (" left: all were too long" if long else "")
        )
    return Prompts(dataset, tokens)


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that makes tokens of a chat: vocabulary, special tokens and chat template."""
    parts = (tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def check_fit(
    prompts: Prompts,
    max_completion_length: int,
    positions: int | None,
    micro_batch_tokens: int | str,
) -> None:
    """Make sure that the widest row has a position for every token, and fits a micro-batch.

    Raises:
        ValueError: it does not.
    """
    width = prompts.longest + max_completion_length
    row = f"the longest prompt ({prompts.longest}) plus max_completion_length is {width} tokens"
    if positions is not None and width > positions:
        raise ValueError(
            f"{row}, beyond the model's max_position_embeddings of {positions}: lower "
            "max_completion_length, or set max_prompt_length with long_prompts drop"
        )
    if isinstance(micro_batch_tokens, int) and width > micro_batch_tokens:
        raise ValueError(
            f"{row}, more than micro_batch_tokens {micro_batch_tokens}: a micro-batch must hold at "
            "least one row"
        )


def encode(
    text: Any,
    tokenizer: PreTrainedTokenizerBase,
    row: int = 0,
    what: str = "prompt",
    open_turn: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Token ids of a string, or of chat messages.

    A BOS that both the text and the tokenizer put in front is kept once. The name of a special
    token is one in a string, which may have been rendered before, and only text in a message.

    Args:
        row, what: how an error calls the text.
        open_turn: end a chat with the opening of the assistant's turn, for the model to continue.
        tools: schemas of the functions that a chat may call.
    """
    where = f"{what} in row {row}"
    if isinstance(text, str):
        ids = _tokenize(tokenizer, text, where, add_special_tokens=True)
    elif isinstance(text, list) and text and isinstance(text[0], dict):
        chat = _rendered(tokenizer, text, where, open_turn, tools)
        ids = _tokenize_chat(tokenizer, chat, where)
    else:
        raise ValueError(f"{where} must be a string or a list of messages, got {text!r}")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    if not ids:
        raise ValueError(f"{where} is empty: a model needs at least one token")
    return ids


def encode_answer(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    stop_id: int | None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Token ids of the answer to an assistant's turn, through the opening of its next turn.

    Args:
        messages: text, which is taken as it is; or chat messages, with all that the chat template
            has between two turns of the assistant.
        prompt: of the chat.
        stop_id: the token that ended the turn, if one did: it is there already.
        tools: as in `encode`.

    Raises:
        ValueError: the messages do not fit the chat template, or it leaves no trace of the turn.
    """
    where = "the answer to a turn"
    if isinstance(messages, str):
        return _tokenize(tokenizer, messages, where, add_special_tokens=False)
    turn = {"role": "assistant", "content": MARK}
    chat = _rendered(tokenizer, [*prompt, turn, *messages], where, True, tools)
    _, mark, text = chat.rpartition(MARK)
    if not mark:
        raise ValueError("the chat template does not show what the assistant said last")
    if stop_id is not None:
        blank, stop, rest = text.partition(tokenizer.decode([stop_id]))
        if stop and not blank.strip():  # some templates have a blank in front of it
            text = rest
    return _tokenize_chat(tokenizer, text, where)


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Any],
    where: str,
    open_turn: bool,
    tools: Sequence[dict[str, Any]],
) -> str:
    """Chat messages by the chat template; for `_tokenize_chat`."""
    if not tokenizer.chat_template:
        raise ValueError(f"{where} is a list of messages, but the tokenizer has no chat_template")
    special = _special(tokenizer)
    _refuse_split(messages, special, where)
    quoted = _quoted(messages, special)
    try:
        chat: str = tokenizer.apply_chat_template(
            quoted, tools=list(tools) or None, add_generation_prompt=open_turn, tokenize=False
        )
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"{where} does not fit the chat template: {error}") from error
    return chat


class _Special(NamedTuple):
    """The special tokens of a tokenizer, and what a `QUOTE` of their names stands for."""

    names: list[str]
    found: re.Pattern[str]  # any of the names
    ids: set[int]


def _special(tokenizer: PreTrainedTokenizerBase) -> _Special:
    """Looked up anew when tokens have been added."""
    return _looked_up(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _looked_up(tokenizer: PreTrainedTokenizerBase, size: int) -> _Special:
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Longer ones before what they begin with; and no text forges a quote.
    names = sorted({*added.values(), "\ue003"}, reverse=True)
    return _Special(names, re.compile("|".join(map(re.escape, names))), set(added))


def _refuse_split(messages: list[Any], special: _Special, where: str) -> None:
    """Parts of a message, which a template may join, must not spell a name together.

    Raises:
        ValueError: they do.
    """
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        apart = sum(len(special.found.findall(text)) for text in texts)
        if len(special.found.findall("".join(texts))) > apart:
            raise ValueError(
                f"{where} spells the name of a special token in neighbouring parts of a message: "
                "make one part of them"
            )


def _quoted(value: Any, special: _Special) -> Any:
    """What messages say, with a `QUOTE` in place of every name."""
    if isinstance(value, list):
        return [_quoted(item, special) for item in value]
    if isinstance(value, dict):
        return {
            _quoted(k, special): v if k == "role" and v in ROLES else _quoted(v, special)
            for k, v in value.items()
        }
    if isinstance(value, str):
        return special.found.sub(
            lambda match: f"\ue003{special.names.index(match.group())}\ue004", value
        )
    return value


def _tokenize_chat(tokenizer: PreTrainedTokenizerBase, chat: str, where: str) -> list[int]:
    """Ids of what `_rendered` gave: a `QUOTE` stands for a name, letter by letter."""
    names = _special(tokenizer).names
    first, *rest = QUOTE.split(chat)
    ids = _tokenize(tokenizer, first, where, add_special_tokens=False)
    for number, text in zip(rest[::2], rest[1::2], strict=True):
        ids += _spelled(tokenizer, names[int(number)], where)
        ids += _tokenize(tokenizer, text, where, add_special_tokens=False)
    return ids


def _spelled(tokenizer: PreTrainedTokenizerBase, name: str, where: str) -> list[int]:
    """Ids of a special token's name, of which none is a special token."""
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    ids = _tokenize(tokenizer, name, where, **plain)
    if _special(tokenizer).ids & set(ids):  # some vocabularies have it among their pieces
        ids = [i for letter in name for i in _tokenize(tokenizer, letter, where, **plain)]
    return ids


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, **options: bool
) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, **options)["input_ids"]
    except Exception as error:  # a character without a token, say
        raise ValueError(f"{where} cannot be tokenized: {error}") from error
    return ids


@dataclass(frozen=True)
class PromptSampler:
    """The endless order of prompts: a pure function of (seed, draw).

    Draw d belongs to epoch d // size and takes place d % size of that epoch's permutation, so the
    number of draws so far is all the state there is.
    """

    size: int
    seed: int
    shuffle: bool = True

    def rows(self, draws: Sequence[int]) -> list[int]:
        """The dataset row of every draw."""
        orders = {epoch: self._order(epoch) for epoch in {draw // self.size for draw in draws}}
        return [orders[draw // self.size][draw % self.size] for draw in draws]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        return permutation(self.size, self.seed, epoch)


def permutation(size: int, *key: int) -> list[int]:
    """A random order of 0..size-1 that depends on the key alone."""
    order: list[int] = np.random.default_rng(key).permutation(size).tolist()
    return order


def batches(rows: range, size: int) -> Iterator[range]:
    """The rows in runs of `size`."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
