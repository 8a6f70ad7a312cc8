"""The report of a run: whole, self-contained, inert whatever its texts say, never in the way."""

import base64
import gzip
import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report import html, journal, run_page, token_steps
from rlhf_pg.report.run_files import RunFiles, tokens_file
from rlhf_pg.report.run_page import write_report
from tests.report.conftest import HOSTILE
from tests.report.synthetic import write_lines


class Read(HTMLParser):
    """A page as a browser's parser sees it: its elements, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.bodies: list[tuple[dict[str, str | None], str]] = []
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            self.bodies.append((self.tags[-1][1] | {"tag": self.inside}, data))

    @property
    def data(self) -> dict[str, Any]:
        (text,) = (body for tag, body in self.bodies if tag.get("id") == "data")
        return dict(json.loads(text))

    def step(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Return the header and the arrays of a packed step."""
        (text,) = (body for tag, body in self.bodies if tag.get("id") == f"step-{number}")
        raw = gzip.decompress(base64.b64decode(text))
        (length,) = struct.unpack("<I", raw[:4])
        return json.loads(raw[4 : 4 + length]), raw[4 + length :]

    @property
    def policy(self) -> str:
        metas = (attributes for tag, attributes in self.tags if tag == "meta")
        return next(str(one["content"]) for one in metas if "http-equiv" in one)


def read(path: Path) -> Read:
    return Read(path.read_text(encoding="utf-8"))


def test_report_has_curves_steps_and_tables(run: Path) -> None:
    page = read(write_report(run))
    data = page.data
    assert data["title"] == "run"
    assert data["subtitle"][:3] == ["PPO", "Qwen2.5-0.5B-Instruct", "40 of 1000 steps"]
    (curve,) = data["runs"]
    lines = RunFiles(run).metrics
    assert curve["x"]["step"] == [line["step"] for line in lines]
    assert curve["metrics"]["reward"] == pytest.approx([line["reward"] for line in lines], rel=1e-5)
    assert curve["x"]["time"][1] == pytest.approx(lines[0]["step_time"] + lines[1]["step_time"])
    assert data["absent"] == ["approx_kl"]
    assert [step["step"] for step in data["steps"]] == [10, 20, 30, 40]
    assert [table["title"] for table in data["tables"]] == ["Beginnings", "Versions", "Config"]


def test_packed_step_gives_tokens_back(run: Path) -> None:
    header, arrays = read(write_report(run)).step(20)
    tokens = RunFiles(run).tokens(20)
    assert tokens is not None
    count = len(tokens.ids)
    assert header["columns"][0] == "advantage"
    assert len(arrays) == count * (4 + 1 + 2 * len(header["columns"]))
    entries = np.frombuffer(arrays[: 4 * count], np.uint8).reshape(4, count).T.copy().view("<u4")
    texts = [header["vocabulary"]["texts"][entry] for entry in entries[:, 0]]
    assert texts == [visible(text) for text in tokens.texts]
    ids = [header["vocabulary"]["ids"][entry] for entry in entries[:, 0]]
    assert ids == tokens.ids.tolist()
    assert list(arrays[4 * count : 5 * count]) == tokens.action.astype(int).tolist()
    plane = np.frombuffer(arrays[5 * count : 7 * count], np.uint8).reshape(2, count)
    assert np.array_equal(
        plane.T.copy().view("<f2")[:, 0], tokens.numbers["advantage"].astype("<f2")
    )


def test_completions_are_matched_to_records_by_place(run: Path) -> None:
    records = RunFiles(run).completions
    write_lines(run / "completions.jsonl", records[::-1])  # in another order
    header, _ = read(write_report(run)).step(10)
    places = {(r["prompt_index"], r["sample"]): r for r in records if r["step"] == 10}
    assert len(header["completions"]) == len(places) == 12
    for one in header["completions"]:
        record = places[header["prompts"][one["prompt"]]["index"], one["sample"]]
        assert one["total"] == record["rewards/accuracy"] + record["rewards/format"]
        assert one["advantage"] == record["advantage"]


def test_run_without_records_has_its_texts(run: Path) -> None:
    for file in (run / "tokens").iterdir():
        file.unlink()
    (run / "trace.jsonl").unlink()
    about = {"step": 10, "prompt_index": 3, "prompt": "1+1=", "completion": "2"}
    write_lines(run / "completions.jsonl", [about | {"sample": i} for i in range(2)])
    page = read(write_report(run))
    header, arrays = page.step(10)
    assert arrays == b""
    assert header["prompts"] == [{"index": 3, "turns": [["", "1+1="]]}]
    assert [one["turns"] for one in header["completions"]] == [[["", "2"]]] * 2
    assert [table["title"] for table in page.data["tables"]] == ["Config"]


@pytest.mark.parametrize("names", [("config.yaml",), ("metrics.jsonl",)])
def test_run_without_steps_has_a_page(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    data = read(write_report(tmp_path)).data
    assert data["charts"] == []
    assert data["steps"] == []
    assert data["warnings"] == []


def test_step_being_written_does_not_spoil_the_others(run: Path) -> None:
    whole = tokens_file(run, 20).read_bytes()
    tokens_file(run, 20).write_bytes(whole[: len(whole) // 2])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('7\nnull\n{"loss": 1}\n{"step": 41, "rew')
    page = read(write_report(run))
    assert len(page.data["runs"][0]["x"]["step"]) == 40
    assert page.step(20)[0]["completions"][0]["turns"]  # the text of the record
    assert page.step(10)[0]["tokens"] > 0


def test_page_runs_its_own_scripts_and_fetches_nothing(hostile_run: Path) -> None:
    page = read(write_report(hostile_run))
    scripts = [(tag, body) for tag, body in page.bodies if tag["tag"] == "script"]
    own = [body for tag, body in scripts if "type" not in tag]
    assert [html.hash_of(body) in page.policy for body in own] == [True, True]
    styles = [body for tag, body in page.bodies if tag["tag"] == "style"]
    assert [html.hash_of(body) in page.policy for body in styles] == [True]
    assert "'unsafe" not in page.policy
    for rule in (
        "default-src 'none'",
        "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ):
        assert rule in page.policy.split("; ")
    for tag, attributes in page.tags:
        assert tag in {"html", "head", "meta", "title", "style", "body", "noscript", "script"}
        assert not {"src", "href", "onload", "onerror", "style"} & attributes.keys()


def test_hostile_texts_are_nowhere_raw(hostile_run: Path) -> None:
    raw = write_report(hostile_run).read_bytes().decode()
    own = sum(len(html.part(name)) for name in (*html.OURS, html.LIBRARY))
    for text in HOSTILE[:3]:
        assert text not in raw
    assert raw.count("</script>") == raw.count("<script")
    assert len(raw) > own
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]", raw)


def test_texts_reach_the_page_visible_and_whole(hostile_run: Path) -> None:
    header, _ = read(write_report(hostile_run)).step(3)
    shown = header["vocabulary"]["texts"]
    expected = [visible(text.encode("utf-8", "replace").decode()) for text in HOSTILE]
    assert shown == expected
    assert "\\u202egnp.exe" in shown
    assert header["prompts"][0]["turns"][0] == [visible(HOSTILE[0])] * 2
    assert header["completions"][3]["error"] == visible(HOSTILE[3])
    everything = json.dumps(header)
    assert "\\u202e" not in everything.replace("\\\\u202e", "")


def test_weights_are_those_of_functions_beside_a_penalty(run: Path) -> None:
    files = RunFiles(run)
    files.config["reward_weights"] = [10.0]
    for record in files.completions:
        record["rewards/missing_eos_penalty"] = -1.0
    assert token_steps.LoggedSteps(files).weights == {"rewards/accuracy": 10.0}


def test_limits_keep_first_best_worst_and_latest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RunFiles(run).completions
    for record in records:
        best, worst = record["step"] == 20, record["step"] == 30
        record["rewards/accuracy"] = 9.0 if best else -9.0 if worst else 0.0
    write_lines(run / "completions.jsonl", records)
    for most, steps in ((48, [10, 20, 30, 40]), (47, [10, 20, 30]), (24, [10, 20]), (1, [10])):
        monkeypatch.setattr(token_steps, "MOST_COMPLETIONS", most)
        data = read(write_report(run)).data
        assert [step["step"] for step in data["steps"]] == steps
        assert bool(data["left_out"]) == (most < 48)


def test_long_curves_become_means(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "MOST_POINTS", 20)
    rewards = [line["reward"] for line in RunFiles(run).metrics]
    (curve,) = read(write_report(run)).data["runs"]
    assert curve["mean_of"] == 2
    assert curve["x"]["step"] == list(range(2, 41, 2))
    assert curve["metrics"]["reward"][0] == pytest.approx((rewards[0] + rewards[1]) / 2, rel=1e-5)


def test_reader_never_sees_half_a_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(run)
    before = path.read_bytes()

    def broken(*_: Any) -> bytes:
        raise OSError("no space left")

    monkeypatch.setattr(token_steps.LoggedSteps, "pack", broken)
    with pytest.raises(OSError, match="no space left"):
        write_report(run)
    assert path.read_bytes() == before
    assert [file.name for file in run.glob("partial-*")] == []


def test_report_takes_one_percent_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], []

    def slow(directory: Path, **_: Any) -> None:
        now[0] += 2.0
        written.append(now[0])

    monkeypatch.setattr(run_page, "write_report", slow)
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    live = journal.Journal(tmp_path, 0, is_main=True)
    for _ in range(1000):
        live._report(running=True)
        now[0] += 1.0
    assert written == [5.0, 207.0, 409.0, 611.0, 813.0]  # not in the first three seconds
    live._report(running=False)
    assert len(written) == 6


def test_step_without_texts_shows_those_of_its_records(run: Path) -> None:
    """Steps that are not logged have tokens without texts."""
    tokens = RunFiles(run).tokens(20)
    replace(tokens, texts=None).save(tokens_file(run, 20))
    replace(tokens, texts=None).save(tokens_file(run, 21))
    page = read(write_report(run))
    assert [step["step"] for step in page.data["steps"]] == [10, 20, 30, 40]
    header, arrays = page.step(20)
    assert arrays == b""
    assert header["completions"][0]["turns"]
