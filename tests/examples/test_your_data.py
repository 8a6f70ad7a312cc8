"""The page docs/your-data.md, as it stands: its files, its recipe, its commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config.parse import parse, recipe_file
from rlhf_pg.tasks.warm_start import ensure_model
from tests.test_code_blocks import BLOCKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your-data.md"
FLAGS = {"ppo": ["--beta", "0"]}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory, but for what the page says to put into it."""
    for name, _, _, text in BLOCKS[PAGE]:
        if name:
            (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "make_problems.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_page_trains_a_model(directory, model_path):
    keys = ["--model_name_or_path", model_path, "--max_steps", "1", "--eval_steps", "0"]
    trainer = GRPOTrainer(args=parse(GRPOConfig, ["--config", "mine.yaml", *keys]))
    assert (len(trainer.train_prompts), len(trainer.eval_sets[""])) == (2700, 300)
    trainer.train()
    [line] = (directory / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rewards/accuracy/mean"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce", "ppo"])
def test_page_raises_held_out_score(directory, algorithm):
    model = ensure_model("arithmetic", None)
    script = str(recipe_file(f"{algorithm}.py"))
    train = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", script]
    flags = ["--config", "mine.yaml", "--model_name_or_path", str(Path(model).absolute())]
    evaluate = [sys.executable, "-m", "rlhf_pg.cli", "eval"]
    keys = ["--dataset_name", "problems.jsonl", "--dataset_columns", "{prompt: question}"]
    keys += ["--dataset_test_split", "0.1", "--reward_funcs", "my_rewards.py:accuracy"]
    keys += ["--max_completion_length", "6", "--json", "before.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = {"cwd": directory, "env": environment, "check": True}
    subprocess.run([*evaluate, flags[3], *keys], **run)
    subprocess.run([*train, *flags, *FLAGS.get(algorithm, [])], **run)
    subprocess.run([*evaluate, "runs/mine", "--json", "after.json"], **run)
    before, after = (
        json.loads((directory / f"{when}.json").read_text()) for when in ("before", "after")
    )
    scores = [one["eval_reward"] for one in (before, after)]
    print(f"\n{algorithm}: {scores[0]:.3f} -> {scores[1]:.3f}")
    assert scores[1] > scores[0] + 0.1
