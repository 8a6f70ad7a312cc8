"""`rlhf-pg report` and `compare`: what they print, and what they refuse."""

from pathlib import Path

import pytest

from rlhf_pg.cli import main
from tests.cli.conftest import refused
from tests.report.synthetic import make_run


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def test_report_is_written_into_the_run(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert said(capsys, "report", str(run)) == f"{run}/report.html\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_compare_prints_differences(tmp_path: Path, capsys) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config={"beta": 0.1})]
    out = tmp_path / "both.html"
    text = said(capsys, "compare", *map(str, runs), "--out", str(out))
    assert ["beta", "0.05", "0.1"] in [line.split() for line in text.splitlines()]
    assert text.rstrip().endswith(str(out))
    assert out.exists()


def test_wrong_use_is_one_line_with_the_remedy(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "runs" / "one", steps=2)
    assert "does not exist: pass the output_dir" in refused(capsys, "report", str(tmp_path / "no"))
    assert "in it are the runs one" in refused(capsys, "report", str(tmp_path / "runs"))
    assert "are required: RUN" in refused(capsys, "report")
    assert "needs two runs or more" in refused(capsys, "compare", str(run))
    assert "--out" in refused(capsys, "report", str(run), "--out", str(tmp_path / "no" / "x.html"))
    (run / "config.yaml").write_text("a: [")
    assert "one/config.yaml: not valid YAML" in refused(capsys, "report", str(run))
    hostile = refused(capsys, "report", "\x1b[31m")
    assert "\x1b" not in hostile
