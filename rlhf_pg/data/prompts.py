"""Prompts, checked and tokenized once, and their order, which resumes from a single number."""

import copy
import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import about, show, tell
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.data.chat import continues, encode
from rlhf_pg.data.messages import Schemas as Schemas, read_tools, storable

logger = logging.getLogger(__name__)

# Columns that a run cannot obey, with the reason.
UNREAD = {
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"), "models read only text here"
    ),
    "chat_template_kwargs": "all rows have those of the key chat_template_kwargs",
    "documents": "templates are given none here",
}
Tools: TypeAlias = Schemas | Callable[[dict[str, Any]], Schemas]  # a function returns a row's


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt that is sampled from."""

    index: int  # seeds the noise, and is the group of its rows
    dataset_row: int
    example: Mapping[str, Any]  # that row
    ids: Sequence[int]

    def opening(self) -> Any:
        """Return a copy of the text or messages: functions that get it may change it."""
        return copy.deepcopy(self.example["prompt"])

    def columns(self) -> dict[str, Any]:
        """Return a copy of the row's other columns, likewise."""
        columns = {name: value for name, value in self.example.items() if name != "prompt"}
        return copy.deepcopy(columns)


@dataclass(frozen=True)
class Prompts:
    """A dataset whose `prompt` column has been tokenized."""

    rows: Dataset
    tokens: list[list[int]]

    def take(self, rows: Sequence[int], indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts of some rows, with the index of each."""
        return [
            Prompt(index=index, dataset_row=row, example=self.rows[row], ids=self.tokens[row])
            for row, index in zip(rows, indices, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the tokens and columns of all rows; a resumed run needs the same."""
        digest = hashlib.sha256("".join(f"{tokens}\n" for tokens in self.tokens).encode())
        for table in self.rows.with_format("arrow").iter(1000):  # as stored, not decoded
            for row in table.to_pylist():
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        return digest.hexdigest()


def load_prompts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int | None = None,
    long_prompts: str = "error",
    tools: Tools = (),
    max_completion_length: int = 0,
    positions: int | None = None,
    micro_batch_tokens: int | str = "auto",
) -> Prompts:
    """Tokenize every prompt and apply the length rules.

    Args:
        dataset: a `Dataset`, or a list of dicts, with a column `prompt` of strings or of lists of
            chat messages.
        long_prompts: "error" refuses longer prompts; "drop" leaves them out and logs how many.
        tools: schemas of the functions that the chats may call, or a function that returns those of
            a row; by default the schemas in its column `tools`, if there is one.
        positions: the model's limit on a prompt with its completion.

    Raises:
        ValueError: no `prompt` column, no rows, an empty or too long prompt (with its row), or one
            that with its completion exceeds the positions or a micro-batch.
    """
    dataset = _in_rows(as_dataset(dataset))
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"the dataset has no column 'prompt' (it has {', '.join(dataset.column_names)}): "
            "rename the one with the prompts, for example by dataset_columns"
        )
    tokens: dict[int, list[int]] = {}  # by row
    long: list[str] = []
    has_tools = bool(tools) or "tools" in dataset.column_names
    continued = 0
    for row, prompt in enumerate(dataset["prompt"]):
        with about(f"row {row}"):
            schemas = tools_of_row(tools, dataset[row]) if has_tools else ()
        if schemas and isinstance(prompt, str):
            raise ValueError(
                f"the prompt in row {row} is a string, but tools are called in a chat: make it a "
                "list of messages"
            )
        ids = encode(prompt, tokenizer, row, tools=schemas)
        continued += continues(prompt)
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            long.append(f"row {row} with {len(ids)} tokens")
        else:
            tokens[row] = ids
    if long and long_prompts == "error":
        raise ValueError(
            f"{len(long)} prompts are longer than max_prompt_length {max_prompt_length}; the first "
            f"is {long[0]}. Raise max_prompt_length, shorten them, or set long_prompts to drop"
        )
    if long:
        logger.warning("dropped %d of %d prompts: too long", len(long), len(dataset))
        dataset = dataset.select(list(tokens))
    if continued == len(dataset) > 0:
        logger.warning(
            "every prompt ends with a message of the assistant, which the policy continues: remove "
            "it if the policy should answer the message before it"
        )
    if not tokens:
        raise ValueError(
            "the dataset has no prompts" + (" left: all were too long" if long else "")
        )
    prompts = Prompts(dataset, list(tokens.values()))
    width = prompts.longest + max_completion_length
    widest = f"the longest prompt ({prompts.longest}) plus max_completion_length is {width} tokens"
    if positions is not None and width > positions:
        raise ValueError(
            f"{widest}, more than the model's max_position_embeddings of {positions}: lower "
            "max_completion_length, or set max_prompt_length with long_prompts drop"
        )
    if isinstance(micro_batch_tokens, int) and width > micro_batch_tokens:
        raise ValueError(
            f"{widest}, more than micro_batch_tokens {micro_batch_tokens}: a micro-batch must "
            "hold at least one row"
        )
    return prompts


def no_tools(row: Mapping[str, Any]) -> Schemas:
    """Return no schemas, whatever a row has."""
    return ()


def tools_of_row(tools: Tools, row: Mapping[str, Any]) -> Schemas:
    """Return the schemas of the functions that a row's chat may call: the run's, or its own in the
    column `tools`; ValueError if there are both.
    """
    if callable(tools):
        return tools(dict(row))
    schemas = read_tools(row.get("tools"), "tools")
    if tools and schemas:
        raise ValueError("tools: both the run and the row have tools: leave out one of them")
    return tools or schemas


def refuse_unread(dataset: Dataset) -> None:
    """Refuse columns that a run would have to ignore, such as images (ValueError)."""
    for name in UNREAD.keys() & {*dataset.column_names}:
        values = dataset.with_format("arrow")[:][name].to_pylist()  # not decoded
        for row, value in enumerate(values):
            if value:
                raise ValueError(
                    f"row {row} has {name}, but {UNREAD[name]}: take out the column, or the rows"
                )


def as_dataset(rows: Any) -> Dataset:
    """Return a dataset, or make one of a list of dicts; ValueError if that is impossible."""
    if isinstance(rows, Dataset):
        return rows
    if not (isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows)):
        hint = ": take one split" if isinstance(rows, Mapping) else ""
        if isinstance(rows, IterableDataset):
            hint = ": read it first, as Dataset.from_list(list(stream.take(1000)))"
        raise ValueError(
            "set dataset_name (a file, a folder or a Hub id) or task, as in docs/your-data.md, "
            f"or give a datasets.Dataset or a list of dicts; got {show(rows)}{hint}"
        )
    with about("the list cannot become a dataset"):
        return from_rows(rows)


def from_rows(
    rows: Sequence[Mapping[str, Any]],
    convert: Callable[[list[Any]], list[Any]] = list,
    where: Callable[[int], str] = "row {}".format,
) -> Dataset:
    """Make a dataset of rows, with every column converted.

    ValueError, with the place of the row and the column, for the first value that does not fit.
    """
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = convert([_storable(name, row.get(name)) for row in rows])
        try:
            columns.append(Dataset.from_dict({name: values}))
        except Exception as error:
            row = bisect_left(range(len(values)), True, key=partial(_misfits, name, values))
            for number in range(row + 1):
                if _is_chat(values[number]):  # which may say what is wrong with a message
                    storable(values[number], f"{name} in {where(number)}")
            raise ValueError(
                f"{where(row)} does not fit in column {name!r}: {tell(error)}. All rows of a "
                "column need one type, such as valid Unicode text"
            ) from error
    return concatenate_datasets(columns, axis=1)


def _storable(name: str, value: Any) -> Any:
    """Return chats in normal form, and schemas of tools as JSON text: see `storable`."""
    if _is_chat(value):
        with suppress(ValueError, TypeError):  # it may be something else, for rewards
            return storable(value, name)
    is_list = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    if name in ("tools", "functions") and is_list:
        if value:
            return json.dumps(value, ensure_ascii=False, default=str)
        return None
    return value


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and ("role" in first or "from" in first)


def _misfits(name: str, values: list[Any], row: int) -> bool:
    """Return whether the values up to a row cannot be in one column."""
    with suppress(Exception):
        Dataset.from_dict({name: values[: row + 1]})
        return False
    return True


def _in_rows(dataset: Dataset) -> Dataset:
    """Return rows with all columns as plain values, for any format of the dataset.

    A transform (`with_transform`) is applied to every row once, since it may be random, but policy
    and reward must see the same.
    """
    if dataset.format["type"] != "custom":
        return dataset.with_format(None)
    try:
        with foreign("the dataset's transform"):
            return from_rows([dataset[row] for row in range(len(dataset))])
    except Exception as error:
        raise ValueError(f"the dataset's transform cannot be applied: {tell(error)}") from error


@dataclass(frozen=True)
class PromptSampler:
    """The endless order of prompts, a pure function of (seed, prompt index).

    Index i is entry i % size of the permutation of epoch i // size, so the number of prompts so far
    is the whole state.
    """

    size: int
    seed: int
    shuffle: bool = True

    def rows(self, indices: Sequence[int]) -> list[int]:
        """Return the dataset row of every prompt index."""
        size = self.size
        orders: dict[int, Sequence[int]] = {
            epoch: permutation(size, self.seed, epoch) if self.shuffle else range(size)
            for epoch in {index // size for index in indices}
        }
        return [orders[index // size][index % size] for index in indices]


def permutation(size: int, *key: int) -> list[int]:
    """Return a random order of 0..size-1 that depends only on the key."""
    order: list[int] = np.random.default_rng(key).permutation(size).tolist()
    return order
