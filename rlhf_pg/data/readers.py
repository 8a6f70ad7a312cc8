"""Read files of JSON, CSV or text, with every value as it is written."""

import csv
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

import fsspec
import numpy as np
from datasets import Dataset

from rlhf_pg.boundary.quoted import about, tell
from rlhf_pg.data.prompts import from_rows

logger = logging.getLogger(__name__)

KINDS = {"json", "csv", "text"}


def read(files: Mapping[str, Sequence[str]], kind: str, separator: str) -> dict[str, Dataset]:
    """Read the files of each split; a column has the same type in all of them.

    ValueError, with the file and its line or row, for what cannot be read.
    """
    rows = list[dict[str, Any]]()
    locations = []
    parts = {}
    for split, paths in files.items():
        start = len(rows)
        for file in paths:
            try:
                records = rows_of(file, kind, separator)
            except Exception as error:
                raise ValueError(f"{file}: {tell(error)}") from error
            for number, record in enumerate(records):
                rows.append(record if isinstance(record, dict) else {"text": record})
                locations.append(f"{file}: row {number}")
        parts[split] = range(start, len(rows))
    if not rows:
        raise ValueError("there are no rows")
    convert = as_numbers if kind == "csv" else list
    table = from_rows(rows, convert, locations.__getitem__)
    return {split: table.select(part) for split, part in parts.items()}


def rows_of(file: str, kind: str, separator: str) -> list[Any]:
    """Return the rows of a file: dicts, or texts of a column `text`."""
    options = {"encoding": "utf-8-sig", "newline": "", "compression": "infer"}
    with fsspec.filesystem("file").open(file, "r", **options) as lines:
        if kind == "json":
            return rows_of_json(lines.read())
        if kind == "csv":
            return rows_of_csv(lines, separator)
        texts = [line.rstrip("\r\n") for line in lines]
    kept = [text for text in texts if text.strip()]
    blank = len(texts) - len(kept)
    if blank:
        logger.warning("%s: left out %d blank lines", file, blank)
    return kept


def rows_of_json(text: str) -> list[Any]:
    """Return the elements of a list, or else a value of each line that is not blank."""
    load = partial(json.loads, object_pairs_hook=without_repeats)
    try:
        value = load(text)
        if isinstance(value, list):
            return value
        return [value]
    except ValueError:
        if text.lstrip().startswith("["):
            raise
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with about(f"line {number}"):
                rows.append(load(line))
    return rows


def rows_of_csv(lines: TextIO, separator: str) -> list[dict[str, str]]:
    """Return the rows below the header."""
    csv.field_size_limit(sys.maxsize)  # a cell may be a long text
    table = csv.DictReader(lines, delimiter=separator, strict=True)
    without_repeats([(name, None) for name in table.fieldnames or ()])
    try:
        rows = list(table)
    except csv.Error as error:
        raise ValueError(
            f"line {table.line_num + 1}: {error}. If a cell begins with a quote, double the quotes "
            "in it and put one in front and one behind"
        ) from error
    for number, row in enumerate(rows):
        if None in row or None in row.values():  # a marker of `DictReader`
            raise ValueError(f"row {number} has more or fewer cells than the header")
    return rows


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return names with their values; ValueError if a name is there twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = ", ".join(name for name, _ in pairs)
        raise ValueError(f"a name is there twice: {names}")
    return record


def as_numbers(cells: list[str]) -> list[Any]:
    """Return a column of CSV as numbers, if Python prints each as it is written, else as texts.

    An empty cell becomes None.
    """
    written = [cell for cell in cells if cell]
    for kind in (np.int64, np.float64):
        with suppress(ValueError, OverflowError):
            if all(str(kind(cell)) == cell and np.isfinite(kind(cell)) for cell in written):
                return [kind(cell) if cell else None for cell in cells]
    return [cell or None for cell in cells]
