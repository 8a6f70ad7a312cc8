"""Datasets with a row, a column or a shape that no prompt should have."""

import datetime
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Sequence, Value, concatenate_datasets

from tests.fuzz.case import Case, even_digits, small

GOOD = ["1+1=", "2+3=", "4+4="]


def rows(prompts: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": prompts})


def beside(column: str, values: Any) -> Dataset:
    return Dataset.from_dict({"prompt": GOOD, column: values})


def said(content: Any, role: Any = "user", **others: Any) -> Dataset:
    return rows([[{"role": role, "content": content, **others}]])


def user(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **others}


def typed(kind: str, values: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": values}, features=Features({"prompt": Value(kind)}))


DATASETS: dict[str, Callable[[], Any]] = {
    "a prompt that is None": lambda: rows([*GOOD, None]),
    "a prompt of nothing": lambda: rows([*GOOD, ""]),
    "a prompt of blanks": lambda: rows([*GOOD, "   "]),
    "numbers for prompts": lambda: rows([1, 2, 3]),
    "NaN for prompts": lambda: rows([float("nan")] * 3),
    "bytes for prompts": lambda: rows([b"1+1="] * 3),
    "dates for prompts": lambda: rows([datetime.date(2020, 1, 1)] * 3),
    "booleans for prompts": lambda: rows([True, False, True]),
    "lists of texts for prompts": lambda: rows([["1+1="], ["2"]]),
    "lists of nothing for prompts": lambda: rows([[], [], []]),
    "a record for a prompt": lambda: rows([user("1")] * 2),
    "letters without a token": lambda: rows([*GOOD, "日本"]),
    "a NUL": lambda: rows([*GOOD, "1\x00"]),
    "a change of direction": lambda: rows([*GOOD, "\u202e1"]),
    "a prompt beyond all positions": lambda: rows([*GOOD, "1" * 5000]),
    "a prompt of special tokens": lambda: rows([*GOOD, "<eos><pad><user>"]),
    "prompts that are alike": lambda: rows(["1+1="] * 50),
    "one row": lambda: rows(["1+1="]),
    "no row": lambda: rows(GOOD).select([]),
    "no column": lambda: Dataset.from_dict({}),
    "another column": lambda: Dataset.from_dict({"question": GOOD}),
    "the column prompts": lambda: beside("prompts", GOOD),
    "the column completions": lambda: beside("completions", GOOD),
    "the column completion_ids": lambda: beside("completion_ids", GOOD),
    "the column self": lambda: beside("self", GOOD),
    "a column without a name": lambda: beside("", GOOD),
    "a column with blanks in its name": lambda: beside("a b\n", GOOD),
    "the column __class__": lambda: beside("__class__", GOOD),
    "a column of None": lambda: beside("answer", [None] * 3),
    "a column of NaN": lambda: beside("answer", [float("nan")] * 3),
    "a column of bytes": lambda: beside("answer", [b"\xff"] * 3),
    "a column of dates": lambda: beside("answer", [datetime.datetime(1, 1, 1)] * 3),
    "a column of records": lambda: beside("answer", [{"a": {"b": [1, None]}}] * 3),
    "a column of times": lambda: beside("answer", [datetime.timedelta(1)] * 3),
    "a column of arrays": lambda: beside("answer", [np.ones((2, 2))] * 3),
    "a column of 1 MB": lambda: beside("answer", ["a" * 2**20] * 3),
    "messages that say None": lambda: said(None),
    "messages that say numbers": lambda: said(5),
    "messages that say lists of numbers": lambda: said([1, 2]),
    "messages with a number for a role": lambda: said("1", role=5),
    "messages with an unknown role": lambda: said("1", role="judge"),
    "messages with None for a role": lambda: said("1", role=None),
    "messages without a role": lambda: rows([[{"content": "1"}]]),
    "messages without words": lambda: said(""),
    "messages with more": lambda: said("1", name="x", weight=0.5, tool_calls=None),
    "messages by three assistants": lambda: rows([[user("1", role="assistant")] * 3]),
    "sixty messages": lambda: rows([[user("1")] * 60]),
    "a chat and a text": lambda: [{"prompt": "1+1="}, {"prompt": [user("1")]}],
    "a list of rows": lambda: [{"prompt": text} for text in GOOD],
    "a list of texts": lambda: GOOD,
    "a mapping of columns": lambda: {"prompt": GOOD},
    "a mapping of datasets": lambda: DatasetDict(train=rows(GOOD)),
    "a stream": lambda: rows(GOOD).to_iterable_dataset(),
    "a table of pandas": lambda: rows(GOOD).to_pandas(),
    "the format numpy": lambda: rows(GOOD).with_format("numpy"),
    "the format torch": lambda: rows(GOOD).with_format("torch"),
    "the format pandas": lambda: rows(GOOD).with_format("pandas"),
    "the format arrow": lambda: rows(GOOD).with_format("arrow"),
    "a format without the prompt": lambda: beside("a", GOOD).with_format("numpy", columns=["a"]),
    "a format that raises": lambda: rows(GOOD).with_transform(lambda batch: 1 / 0),
    "a format of fewer rows": lambda: rows(GOOD).with_transform(lambda batch: {"prompt": []}),
    "rows that are picked twice": lambda: rows(GOOD).select([2, 0, 2]),
    "rows in pieces": lambda: concatenate_datasets([rows(GOOD[:1]), rows(GOOD[1:])]),
    "long strings": lambda: typed("large_string", GOOD),
    "strings of categories": lambda: rows(GOOD).class_encode_column("prompt"),
    "a sequence of strings": lambda: Dataset.from_dict(
        {"prompt": [["1"]]}, features=Features({"prompt": Sequence(Value("string"))})
    ),
    "a path": lambda: "no/such/file.json",
    "a class": lambda: Dataset,
}


def draw(rng: random.Random, number: int) -> Case:
    """The dataset of this number, to train on or to evaluate with."""
    what, make = list(DATASETS.items())[number % len(DATASETS)]
    name = rng.choice(["train_dataset", "train_dataset", "eval_dataset"])
    options: dict[str, Any] = {"eval_steps": 1} if name == "eval_dataset" else {}

    def judge(completions: Any, prompts: Any, **columns: Any) -> Any:
        return even_digits(completions)

    names = (name, "dataset", "row", "column", "prompt")
    return Case(
        kind="dataset",
        what=f"{name} with {what}",
        run=lambda output: small(output, reward_funcs=judge, **{name: make()}, **options),
        names=names,
    )
