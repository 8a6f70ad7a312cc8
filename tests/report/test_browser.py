"""The pages in a real browser, where there is one (`make test-slow`)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf_pg.replay.comparison import write_comparison
from rlhf_pg.report.run_page import write_report
from tests.report.conftest import HOSTILE
from tests.report.synthetic import make_run
from tests.report.test_run_page import Read

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
MATE = r'class="mate[ "]'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


def drawn(page: Path, tab: str) -> str:
    """The elements that a browser has made of a page; nothing is said on its console."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += ["--window-size=1400,1000", "--virtual-time-budget=20000", "--dump-dom"]
    command = [CHROMIUM, *flags, f"{page.absolute().as_uri()}#{tab}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert "<main" in done.stdout
    return done.stdout


def test_hostile_completions_stay_text(hostile_run: Path) -> None:
    text = drawn(write_report(hostile_run), "tokens")
    assert len(re.findall(MATE, text)) == len(HOSTILE)
    tags = [tag for tag, _ in Read(text).tags]
    assert "img" not in tags
    assert tags.count("script") == 4  # data, library, ours, one step
    assert "\\u202egnp.exe" in text
    assert "\u202e" not in text


def test_tokens_of_the_last_step_are_shown(run: Path) -> None:
    text = drawn(write_report(run), "tokens")
    assert len(re.findall(MATE, text)) == 4
    assert "40 (4 of 4)" in text
    assert "positive" in text  # a shade, of an advantage


def test_pages_of_every_kind_are_drawn(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").touch()
    other = make_run(tmp_path / "other", steps=15)
    compared = write_comparison([run, other, empty], tmp_path / "compare.html")
    for page in (write_report(empty), write_report(run), compared):
        for tab in ("curves", "tables"):
            drawn(page, tab)
