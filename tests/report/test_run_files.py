"""A run directory of anybody: pages, comparisons and differences leave out what is no record of a
run, or end in one error.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_pg.cli import main
from tests.report.synthetic import make_run

DEEP = "[" * 100_000 + "]" * 100_000
VALUES = (
    "null",
    "true",
    "-1",
    "NaN",
    "1e308",
    "9" * 400,
    '"x"',
    "[]",
    '{"a": 1}',
    "[" * 80 + "]" * 80,
)
# Ten of ten of ten ...: few bytes that print as a billion characters.
ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"steps": 4, "every": 2, "prompts": 2, "n": 2, "lengths": (3, 6)}
    return make_run(tmp_path_factory.mktemp("good") / "run", **sizes)


def commands(good: Path, bad: Path) -> list[int]:
    """The status of each command."""
    ended = []
    for command in (
        ["report", str(bad), "--out", f"{bad.parent}/report.html"],
        ["compare", str(good), str(bad), "--out", f"{bad.parent}/compare.html"],
        ["diff", str(good), str(bad)],
        ["replay", str(bad), "--step", "1"],
    ):
        try:
            main(command)
            ended.append(0)
        except SystemExit as end:
            ended.append(end.code)
    return ended


@pytest.mark.parametrize("name", ["metrics", "trace", "completions"])
def test_values_of_lines_may_be_anything(good: Path, tmp_path: Path, name: str) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    file = bad / f"{name}.jsonl"
    first = file.read_text().splitlines()[0]
    names = ["loss", "reward", "versions", "backend", "weights", "prompt_index", "prompt", "step"]
    start = '"step": 1, "versions": {}, "processes": 1, "backend": "", "device": "", "weights": {}'
    lines = [f'{{{start}, "{key}": {value}}}' for key in names for value in VALUES]
    lines += ["", "\0", "[]", "{", DEEP, f'{{"step": 1, "x": {DEEP}}}', '{"step": 1}', first]
    file.write_text("\n".join(lines))
    *pages, diff, _ = commands(good, bad)
    assert pages == [0, 0]
    assert diff in (0, 1)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    with open(file, "wb") as opened:
        opened.truncate(2**33)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.jsonl", "config.yaml"])
@pytest.mark.parametrize("change", [pipe, link, sparse])
def test_file_that_is_none_is_one_error(
    good: Path, tmp_path: Path, name: str, change: Callable[[Path], None], capsys
) -> None:
    shutil.copytree(good, tmp_path / "bad")
    change(tmp_path / "bad" / name)
    assert commands(good, tmp_path / "bad") == [2] * 4
    assert f"{name}: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "- a", DEEP, "a: &a [*a]", ALIASES])
def test_config_that_is_none_is_one_error(good: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(good, tmp_path / "bad")
    (tmp_path / "bad/config.yaml").write_text(text)
    assert commands(good, tmp_path / "bad")[3] == 2


def test_tokens_that_do_not_fit_together_are_left_out(good: Path, tmp_path: Path, capsys) -> None:
    files = sorted((good / "tokens").iterdir())
    for name, x in load_file(files[0]).items():
        changes = (x[:0], x[:1], x[None], np.full(x.shape, np.nan), np.full(x.shape, 2**62))
        for number, change in enumerate(changes):
            bad = tmp_path / "bad"
            shutil.copytree(good, bad, dirs_exist_ok=True)
            save_file(load_file(files[0]) | {name: change}, bad / "tokens" / files[0].name)
            assert set(commands(good, bad)[:3]) <= {0, 1}, (name, number)
