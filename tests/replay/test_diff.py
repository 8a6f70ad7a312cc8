"""`diff_runs` names the step, the stage and the row of a difference."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_pg import GRPOTrainer
from rlhf_pg.replay.comparison import diff_runs
from rlhf_pg.report.run_files import RunFiles, StepTokens, tokens_file
from tests.trainers.conftest import maker

ROW = 6  # prompt 9, sample 2, of step 3
RUN = {"max_steps": 4, "save_steps": 1, "log_completions_steps": 2}


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("trained")
    maker(model_path, directory)(GRPOTrainer, **RUN).train()
    return directory / "run"


@pytest.fixture
def runs(trained, tmp_path) -> tuple[Path, Path]:
    """A run, which is not to be changed, and a copy of it."""
    return trained, shutil.copytree(trained, tmp_path / "b")


def edit_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def plant(run: Path, change: Callable[[StepTokens], dict[str, Any]]) -> None:
    """Change arrays in the record of step 3."""
    record = RunFiles(run).tokens(3)
    assert record is not None
    replace(record, **change(record)).save(tokens_file(run, 3))


def added(column: Any, place: int, more: float = 1.0) -> Any:
    changed = column.copy()
    changed[place] += more
    return changed


def of_numbers(name: str, record: StepTokens) -> dict[str, Any]:
    column = added(record.numbers[name], int(record.starts[ROW]), 1e-4)
    return {"numbers": {**record.numbers, name: column}}


def scored(record: StepTokens) -> dict[str, Any]:
    scores = record.scores.copy()
    scores[ROW] += 0.5
    return {"scores": scores}


PLANTED: dict[str, Callable[[StepTokens], dict[str, Any]]] = {
    "prompts": lambda record: {"row": added(record.row, ROW)},
    "ids": lambda record: {"ids": added(record.ids, int(record.starts[ROW]))},
    "logprobs": lambda record: of_numbers("sampler_logprob", record),
    "scores": scored,
    "advantages": lambda record: of_numbers("advantage", record),
}


@pytest.mark.parametrize("stage", PLANTED)
def test_planted_difference_is_named(runs: tuple[Path, Path], stage: str) -> None:
    plant(runs[1], PLANTED[stage])
    found = diff_runs(*runs)
    assert found
    assert (found.step, found.places[0].stage) == (3, stage)
    assert found.places[0].what.startswith("prompt 9, sample 2 ")
    assert found.places[0].rows == 1
    assert found.places[0].a != found.places[0].b
    assert not found.config
    if stage == "advantages":
        record = RunFiles(runs[0]).tokens(3)
        own = record.numbers["advantage"][record.starts[ROW]]
        assert found.places[0].a == pytest.approx(own)
        assert found.places[0].b == pytest.approx(own + 1e-4)


def test_equal_runs_have_no_difference(runs: tuple[Path, Path]) -> None:
    found = diff_runs(*runs)
    assert not found
    assert found.steps == 4


def test_shorter_completion_is_another(runs: tuple[Path, Path]) -> None:
    """A token moves from a completion to the one before; all ids together are the same."""

    def moved(record: StepTokens) -> dict[str, Any]:
        return {"lengths": added(added(record.lengths, ROW), ROW + 1, -1)}

    plant(runs[1], moved)
    place = diff_runs(*runs).places[0]
    assert place.stage == "ids"
    assert place.a == "no token"


def test_gradient_and_weights(runs: tuple[Path, Path]) -> None:
    def louder(line: dict[str, Any]) -> None:
        line["grad_norm"] *= 2 if line["step"] == 2 else 1

    def heavier(line: dict[str, Any]) -> None:
        if line["step"] == 2 and "weights" in line:
            line["weights"]["model.norm.weight"] = "0"

    edit_lines(runs[1] / "trace.jsonl", heavier)
    found = diff_runs(*runs)
    assert (found.step, found.places[0].stage) == (2, "weights")
    assert found.places[0].what == "model.norm.weight"
    edit_lines(runs[1] / "metrics.jsonl", louder)
    found = diff_runs(*runs)
    assert [place.stage for place in found.places] == ["gradient", "weights"]
    assert found.places[0].what == "grad_norm"


def test_weights_before_the_first_step(runs: tuple[Path, Path]) -> None:
    def other(line: dict[str, Any]) -> None:
        if "versions" in line:
            line["weights"]["model.norm.weight"] = "0"

    edit_lines(runs[1] / "trace.jsonl", other)
    found = diff_runs(*runs)
    assert (found.step, found.places[0].what) == (0, "model.norm.weight")


def test_config_versions_and_lengths(runs: tuple[Path, Path]) -> None:
    def newer(line: dict[str, Any]) -> None:
        if "versions" in line:
            line["versions"]["torch"] = "9.9"

    edit_lines(runs[1] / "trace.jsonl", newer)
    config = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(config.replace("beta: 0.0", "beta: 0.5"))
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    (runs[1] / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    trace = (runs[1] / "trace.jsonl").read_text().splitlines()
    kept = [line for line in trace if json.loads(line)["step"] < 4]
    (runs[1] / "trace.jsonl").write_text("\n".join(kept) + "\n")
    found = diff_runs(*runs)
    assert found.config == {"beta": ("0.0", "0.5")}
    assert [*found.versions] == ["torch"]
    assert (found.step, found.steps, found.only_a, found.only_b) == (None, 3, 1, 0)
    assert found


def test_rounding_is_allowed_if_asked_for(runs: tuple[Path, Path]) -> None:
    plant(runs[1], PLANTED["logprobs"])
    assert not diff_runs(*runs, rtol=1e-3)
    assert diff_runs(*runs, rtol=1e-6)
    plant(runs[1], PLANTED["ids"])
    assert diff_runs(*runs, rtol=1.0).places[0].stage == "ids"
