"""The first hour on a GPU is not lost to the first check that fails, hangs or kills its process."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import broken, checks, report
from tests.gpu.check import Result
from tests.gpu.checks import Job
from tests.gpu.groups import GROUPS, correctness
from tests.gpu.report import Row

ENVIRONMENT = {"device": "some GPU", "versions": {"torch": "2.13.0"}}


def rows(name: str, logs: Path, seconds: float = 100.0) -> list[Row]:
    until = time.monotonic() + seconds
    return list(checks.run(Job(name, broken.GROUPS[name], "cpu", until, logs, "tests.gpu.broken")))


@pytest.mark.slow
def test_failing_check_does_not_stop_next(tmp_path: Path) -> None:
    found = rows("every_way", tmp_path)
    assert [(row.what, row.passed) for row in found] == [
        ("fine", True),
        ("raises", False),
        ("abort", False),
        ("poisons", False),
        ("hangs", False),
        ("fine", True),
        ("preparing the checks", False),
    ]
    fine, raised, aborted, poisoned, hung, again, unprepared = found
    assert fine.group == "every_way"
    assert fine.figure == again.figure == "1.5 s"
    assert fine.value == again.value == 1.5
    assert raised.figure.startswith("ValueError: the first line (tests/gpu/broken.py:")
    assert "SIGABRT" in aborted.figure
    assert poisoned.figure.startswith("AcceleratorError: CUDA error: an illegal")
    assert "stopped after 1 s" in hung.figure
    assert 1 <= hung.seconds < 60
    assert unprepared.figure.startswith("OSError: no space left (tests/gpu/broken.py:")
    log = (tmp_path / "every_way.log").read_text()
    assert "and a second" in log  # the whole error, with its traceback
    assert "Traceback" in log
    assert "a library that talks" in log


def test_group_that_cannot_start_ends(tmp_path: Path) -> None:
    (row,) = rows("dies", tmp_path)
    assert (row.what, row.passed) == ("starting", False)
    assert "SIGABRT" in row.figure


def test_check_without_time_left_has_not_failed(tmp_path: Path) -> None:
    found = rows("slow", tmp_path, seconds=4.0)
    assert found[-1] == Row("slow", "what comes after", "no time left for it", None, None, 0.0)
    assert all(row.passed is not False for row in found)


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


@pytest.mark.parametrize("name", ["float32", "sampling", "presets", "steps"])
def test_checks_run_on_cpu(name: str) -> None:
    group = GROUPS[name].checks("cpu")  # it owns the directory that the check needs
    what, check = next(group)
    assert isinstance(result := check(), Result), what
    assert result.passed


def test_nondeterministic_kernels_are_reported() -> None:
    with correctness.deterministic() as without:
        assert torch.are_deterministic_algorithms_enabled()
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert without == {"put_"}
