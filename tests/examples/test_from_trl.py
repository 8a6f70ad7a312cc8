"""TRL's examples with the import changed train, on tiny local models and datasets."""

import json
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_pg
from rlhf_pg import NAMES_OF_TRL
from rlhf_pg.report.run_files import read

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--max_completion_length", "6", "--prompts_per_step", "4", "--max_steps", "2"]


@pytest.fixture
def dataset(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    rows = [{"prompt": f"{n}+{n + 1}=", "completion": "0"} for n in range(12)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text(text)
    return str(directory)


def run(monkeypatch, name: str, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_quickstart_trains(monkeypatch, model_path, dataset, tmp_path, algorithm):
    run_dir = tmp_path / "run"
    flags = ["--model", model_path, "--dataset", dataset, "--output_dir", str(run_dir), *SMALL]
    run(monkeypatch, f"from_trl_{algorithm}.py", *flags)
    lines = read(run_dir / "metrics.jsonl")
    assert [1 <= line["rewards/reward_num_unique_chars/mean"] <= 6 for line in lines] == [True] * 2
    assert (run_dir / "final" / "model.safetensors").exists()


def test_ppo_script_trains_with_reward_model_and_critic(monkeypatch, model_path, dataset, tmp_path):
    torch.manual_seed(1)
    judge, run_dir = tmp_path / "judge", tmp_path / "run"
    AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1).save_pretrained(
        judge
    )
    AutoTokenizer.from_pretrained(model_path).save_pretrained(judge)
    flags = ["--sft_model_path", model_path, "--reward_model_path", str(judge)]
    flags += ["--dataset", dataset, "--split", "train", "--eval_samples", "4", "--eval_steps", "2"]
    run(monkeypatch, "from_trl_ppo.py", *flags, "--output_dir", str(run_dir), *SMALL)
    lines = read(run_dir / "metrics.jsonl")
    assert [line["value_loss"] > 0 for line in lines] == [True] * 2
    assert "eval_reward" in lines[1]
    assert (run_dir / "final" / "critic").is_dir()


@pytest.mark.parametrize("name", NAMES_OF_TRL)
def test_name_of_trl_is_an_error_with_what_to_use(name):
    with pytest.raises(ImportError, match=name) as caught:
        getattr(rlhf_pg, name)
    for ours in re.findall(r"rlhf_pg\.[\w.]+", str(caught.value)):
        pkgutil.resolve_name(ours)
