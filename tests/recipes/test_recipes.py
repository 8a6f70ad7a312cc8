"""The recipe files and the command, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_pg.cli import main
from rlhf_pg.cli.train import run_recipe
from rlhf_pg.config import (
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
)
from rlhf_pg.config.parse import parse
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import TASKS
from tests.cli.conftest import refused

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "rloo": RLOOConfig,
    "reinforce": ReinforceConfig,
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
}
SMALL = ["--max_steps=2", "--prompts_per_step=4", "--eval_steps=0"]


EMBEDDED = [p for name in sorted(TASKS) for p in sorted(RECIPES.glob(f"*_{name}.yaml"))]


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda p: p.stem)
def test_recipe_parses_with_config_of_same_algorithm(path: Path) -> None:
    algorithm, _, task = path.stem.rpartition("_")
    args = parse(CONFIGS[algorithm], ["--config", str(path)])
    assert (args.algorithm, args.task) == (algorithm, task)
    assert (RECIPES / f"{algorithm}.py").exists()


@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.distributed)],
)
def test_recipe_trains_under_accelerate_launch(
    processes: int, model_path: str, tmp_path: Path
) -> None:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    setup = {
        1: ["--cpu", "--num_processes", "1"],
        2: ["--config_file", str(RECIPES / "accelerate" / "cpu_2.yaml")],
    }[processes]
    recipe = [str(RECIPES / "grpo.py"), "--config", str(RECIPES / "grpo_arithmetic.yaml")]
    flags = [*SMALL, "--model_name_or_path", model_path, "--output_dir", str(tmp_path / "run")]
    flags += ["--report_to", "tensorboard"]
    setup += ["--main_process_port", "0"]  # whichever is free: other tests may be running
    done = subprocess.run(
        [*accelerate, *setup, *recipe, *flags],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    described = "1 process, cpu" if processes == 1 else "2 processes (gloo, DDP), cpu"
    assert f"GRPOTrainer: {described}" in done.stdout
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert set(KEYS) <= set(lines[0])
    # One writer of numbers and one of hyper-parameters: the main process reports alone.
    assert len(list((tmp_path / "run" / "tensorboard").rglob("events.*"))) == 2


def test_train_command_plays_episodes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for part in TASKS["calculator"]().new_model():
        part.save_pretrained(tmp_path / "start")
    recipe = RECIPES / "grpo_arithmetic.yaml"
    limits = ["--max_turns=3", "--max_completion_length=16"]
    paths = ["--model_name_or_path", str(tmp_path / "start"), "--output_dir", str(tmp_path / "run")]
    main(["train", str(recipe), *SMALL, "--task", "calculator", *limits, *paths])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["episodes/failed"] for line in lines] == [0, 0]
    assert "tools/call_frequency" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "a recipe is needed"),
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["dance"], "invalid choice: 'dance'"),
        (["train", str(RECIPES / "accelerate" / "cpu_2.yaml")], "algorithm must be one of grpo"),
    ],
)
def test_wrong_usage_exits_with_code_2(arguments, message, capsys) -> None:
    assert message in refused(capsys, *arguments)


def test_keyboard_interrupt_exits_with_code_130(monkeypatch, capsys) -> None:
    def interrupted(flags) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_pg.cli.demo.demo", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(["demo"])
    assert exit_.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted: if a step was finished, resume with")


@pytest.mark.parametrize("run", [lambda: main(["train", "ppo"]), lambda: run_recipe("ppo", [])])
def test_error_of_user_code_shows_its_frames_alone(run, monkeypatch, capsys) -> None:
    def lost(*_) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("rlhf_pg.cli.train.parse", lost)
    with pytest.raises(SystemExit):
        run()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split('"')[1] for line in lines if "File" in line] == [__file__]
    assert [line for line in lines if line[0] != " "] == ["error: KeyError: 'lost'"]
    monkeypatch.setenv("RLHF_PG_DEBUG", "1")
    with pytest.raises(KeyError):
        run()


def test_reward_model_for_task_without_pairs_is_refused(capsys) -> None:
    recipe = str(RECIPES / "reward_model_preference.yaml")
    said = refused(capsys, "train", recipe, "--task", "arithmetic")
    assert "arithmetic has no preference pairs" in said


def test_demo_command_shows_results_and_report(model_path: str, tmp_path: Path, capsys) -> None:
    out = ["--output_dir", str(tmp_path)]
    brief = ["--max_completion_length=1", "--save_best=false"]
    main(["demo", *SMALL, *brief, *out, "--model_name_or_path", model_path])
    shown = capsys.readouterr().out
    assert shown.count("held-out reward") == 3  # at the start, and both at the end
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
