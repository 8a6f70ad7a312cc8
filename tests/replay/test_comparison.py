"""Runs beside one another: what differs in them, and nothing else."""

from pathlib import Path

import pytest

from rlhf_pg.replay.comparison import difference_tables, name_runs, write_comparison
from tests.report.synthetic import make_run
from tests.report.test_run_page import read

RATE = {"learning_rate": 3e-6, "output_dir": "runs/b", "new_key": True}


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    one = make_run(tmp_path / "a", steps=20)
    return [one, make_run(tmp_path / "b", steps=30, config=RATE, seed=1)]


def test_tables_have_what_differs(two: list[Path]) -> None:
    results, config, versions = difference_tables(name_runs(two))
    assert results["rows"][0] == ["steps", "20", "30"]
    assert config["head"] == ["key", "a", "b"]
    assert config["rows"] == [
        ["learning_rate", "1e-06", "3e-06"],
        ["new_key", "-", "true"],
        ["output_dir", "runs/synthetic", "runs/b"],  # a place: last, and dimmed
    ]
    assert config["dimmed"] == 1
    assert versions["rows"] == []
    assert versions["note"] == "The same packages, device and number of processes."


def test_each_number_has_a_chart_with_all_runs(two: list[Path], tmp_path: Path) -> None:
    data = read(write_comparison(two, tmp_path / "compare.html")).data
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert all(len(chart["keys"]) == 1 for chart in data["charts"])
    keys = [chart["keys"][0] for chart in data["charts"]]
    assert len(keys) == len(set(keys))
    assert {"reward", "rewards/accuracy/mean", "eval_reward", "my/number"} <= set(keys)


def test_names_of_runs_differ() -> None:
    paths = [Path("/x/one/run"), Path("/x/two/run")]
    assert list(name_runs(paths)) == ["one/run", "two/run"]
    assert list(name_runs([paths[0], paths[0]])) == ["1: /x/one/run", "2: /x/one/run"]
