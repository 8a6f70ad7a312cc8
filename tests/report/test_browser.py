"""The pages in a real browser, where there is one (`make test-slow`)."""

from pathlib import Path

import pytest

from rlhf_pg.replay.comparison import write_comparison
from rlhf_pg.report.run_files import read
from rlhf_pg.report.run_page import write_report
from tests.report.browser import Page, chromium, page
from tests.report.conftest import HOSTILE
from tests.report.synthetic import make_run, write_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="needs chromium and websockets"),
]
TEXTS = "[...document.querySelectorAll('.mate .text')].map(one => one.textContent)"
SHADES = (
    "[...new Set([...document.querySelectorAll('.mate .text > span')]"
    ".map(x => x.style.backgroundColor).filter(Boolean))]"
)
CLICK = "[...document.querySelectorAll('button')].find(x => x.textContent === '%s').click()"
WATCH = """
window.cut = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const { width } = this.measureText(text);
  const left = x - width * { left: 0, center: 0.5, right: 1 }[this.textAlign];
  if (left < 0 || left + width > this.canvas.width) cut.push(text);
  draw.call(this, text, x, y);
};
"""
FITS = (
    "[...document.querySelectorAll('.uplot')]"
    ".every(one => one.clientWidth === one.parentElement.clientWidth)"
)
CURRENT = (
    "[...document.querySelectorAll('.prompts button')].findIndex(x => x.ariaCurrent === 'true')"
)


def open_file(opened: Page, path: Path) -> None:
    opened.open(path.absolute().as_uri())


def test_hostile_completions_stay_text(hostile_run: Path) -> None:
    with page() as opened:
        open_file(opened, write_report(hostile_run))
        for tab in ("c", "t", "i"):
            opened.press(tab)
            opened.wait("document.readyState === 'complete'")
        opened.press("t")
        opened.wait("document.querySelectorAll('.mate').length > 0")
        texts = opened.run(TEXTS)
        assert texts[:2] == list(HOSTILE[:2])
        assert texts[4] == "\\u202egnp.exe"
        assert opened.run("window.hacked") is None
        assert opened.run("document.querySelectorAll('img').length") == 0
        assert opened.run("document.scripts.length") == 4  # data, library, ours, one step
        assert opened.complaints == []
        assert len(set(opened.requests)) == 1


def test_keys_change_colours_steps_and_prompts(run: Path) -> None:
    with page() as opened:
        open_file(opened, write_report(run))
        opened.press("t")
        opened.wait("document.querySelectorAll('.mate').length === 4")
        assert opened.run("document.querySelector('.step').textContent") == "40 (4 of 4)"
        for key, signs in (
            *(("a", {"positive", "negative"}), ("p", {"size"})),
            *(("5", {"positive"}), ("l", {"positive", "negative"})),
        ):
            opened.press(key)
            shades = opened.run(SHADES)
            assert {sign for sign in signs if any(sign in shade for shade in shades)} == signs, key
            assert len(shades) > 3
        opened.press("ArrowDown")
        assert opened.run(CURRENT) == 1
        opened.press("ArrowLeft")
        opened.wait("document.querySelector('.step').textContent === '30 (3 of 4)'")
        assert opened.complaints == []


def test_charts_follow_their_cards_with_whole_labels(run: Path) -> None:
    lines = [
        line | {"frac_reward_zero_std": -1e6 - 100 * line["step"]}
        for line in read(run / "metrics.jsonl")
    ]
    write_lines(run / "metrics.jsonl", lines)
    with page(width=400) as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        open_file(opened, write_report(run))
        opened.run("document.querySelector('main').style.width = '330px'")  # the window stays
        opened.wait(FITS)
        assert opened.run("cut") == []


def test_pages_of_every_kind_say_nothing_on_the_console(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").touch()
    other = make_run(tmp_path / "other", steps=15)
    compared = write_comparison([run, other, empty], tmp_path / "compare.html")
    with page(dark=True) as opened:
        for path in (write_report(empty), compared):
            open_file(opened, path)
            opened.press("i")
        assert opened.complaints == []
