"""The first hour on a GPU is not lost to the first check that fails, hangs or kills its process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import checks, report
from tests.gpu.check import Result
from tests.gpu.group import go
from tests.gpu.groups import GROUPS
from tests.gpu.report import Row

ENVIRONMENT = {"device": "some GPU", "versions": {"torch": "2.13.0"}}


def test_report_is_complete_json(tmp_path: Path) -> None:
    found = [Row("a", "b", "1.5 s", 1.5, True, 2.0), Row("a", "c", "-", None, None, 0.0)]
    report.write(tmp_path / "r.json", ENVIRONMENT, found, 12.34, done=True)
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["device"] == "some GPU"
    assert (read["done"], read["seconds"]) == (True, 12.3)
    assert (read["passed"], read["failed"], read["not_checked"]) == (1, 0, 1)
    assert read["checks"][0] == {
        "group": "a", "what": "b", "figure": "1.5 s", "value": 1.5, "passed": True, "seconds": 2.0
    }  # fmt: skip
    assert set(report.environment("cpu")) >= {"device", "driver", "commit", "versions", "date"}


def test_missing_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.sh", "--json", str(tmp_path / "r.json")])
    checks.main()
    assert capsys.readouterr().out == "no GPU here: nothing checked\n"
    assert not (tmp_path / "r.json").exists()


def test_pattern_picks_checks() -> None:
    events: list[dict[str, Any]] = []
    picked = [(name, lambda: Result("1", True)) for name in ("decoding, llama", "gradient, qwen3")]
    go("group", iter(picked), 0, events.append, "^gradient")
    assert [event["row"]["what"] for event in events if "row" in event] == ["gradient, qwen3"]
    assert events[-1] == {"done": True}


@pytest.mark.parametrize("name", ["float32", "sampling", "steps"])
def test_checks_run_on_cpu(name: str) -> None:
    group = GROUPS[name].checks("cpu")  # it owns the directory that the check needs
    what, check = next(group)
    assert isinstance(result := check(), Result), what
    assert result.passed
