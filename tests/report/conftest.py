"""Runs that pages are made of, with all that they may say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pg.report.run_files import StepTokens, tokens_file
from tests.report.synthetic import make_run, tokens_of, write_lines

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!--<script>",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe",
    "a\u2028b\u2029c",
    "\ud800",
    "\x00\x9b2J",
    "${alert(1)}`'\"&lt;",
    "javascript:window.hacked = 3",
)
NUMBERS = {"advantage": 0.5, "kl": 0.25}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 40 steps, of which four are logged."""
    return make_run(tmp_path / "run")


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run whose texts, names and config try to be more than text."""
    return make_hostile_run(tmp_path / "hostile")


def make_hostile_run(directory: Path) -> Path:
    make_run(directory, steps=3, every=5, config={"model_name_or_path": HOSTILE[0]})
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    named = {f"rewards/{text}/mean": 0.5 for text in HOSTILE} | dict.fromkeys(HOSTILE, 1.0)
    write_lines(directory / "metrics.jsonl", [line | named for line in lines])
    save_tokens(directory, 3, list(HOSTILE))
    records = [
        {
            "step": 3,
            "prompt_index": 7,
            "sample": i,
            "prompt": [{"role": text, "content": text}],
            "completion": text,
            f"rewards/{text}": float(i),
            "advantage": None,
            "error": text,
            text: text,
        }
        for i, text in enumerate(HOSTILE)
    ]
    write_lines(directory / "completions.jsonl", records)
    return directory


def save_tokens(directory: Path, step: int, texts: list[str], **numbers: Any) -> StepTokens:
    """Write the tokens of one prompt, of which each completion is one token."""
    count = len(texts)
    columns = {name: np.full(count, x) for name, x in (numbers or NUMBERS).items()}
    places = [(7, i) for i in range(count)]
    tokens = tokens_of(places, [1] * count, list(range(count)), texts, columns)
    tokens.save(tokens_file(directory, step))
    return tokens
