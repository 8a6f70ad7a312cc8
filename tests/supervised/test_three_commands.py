"""SFT, reward model and PPO by three commands on a user's files."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSequenceClassification

from rlhf_pg.cli.main import main
from rlhf_pg.report.run_files import read
from tests.rewards.test_reward_model import letters
from tests.tiny import tiny_model


def rows(path: Path, made: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_three_commands_train_on_own_files(tmp_path: Path, lora: bool) -> None:
    tiny_model("llama", scale=0.05).save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    said = [{"prompt": f"{chr(97 + i % 20)} ", "completion": "ab"} for i in range(40)]
    pairs = [{"prompt": row["prompt"], "chosen": "aa", "rejected": "bb"} for row in said]
    common = {"use_peft": lora, "max_steps": 2}
    supervised = common | {"dataset_test_split": 0.2, "batch_size": 8, "learning_rate": 1e-3}
    recipes = {
        "sft": supervised
        | {"model_name_or_path": "base", "dataset_name": rows(tmp_path / "a.jsonl", said)},
        "reward_model": supervised
        | {"model_name_or_path": "sft/final", "dataset_name": rows(tmp_path / "b.jsonl", pairs)},
        "ppo": {"max_steps": 2}  # an adapter is trained further
        | {
            "model_name_or_path": "sft/final",
            "dataset_name": rows(tmp_path / "c.jsonl", [{"prompt": r["prompt"]} for r in said]),
            "reward_model_name_or_path": str(tmp_path / "reward_model" / "final"),
            "max_completion_length": 4,
        },
    }
    for name, keys in recipes.items():
        keys["model_name_or_path"] = str(tmp_path / keys["model_name_or_path"])
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(
            yaml.safe_dump({"algorithm": name, "output_dir": str(tmp_path / name)} | keys)
        )
        main(["train", str(recipe)])
    assert json.loads((tmp_path / "sft" / "metrics.json").read_text())["eval_loss"] > 0
    judged = json.loads((tmp_path / "reward_model" / "metrics.json").read_text())
    assert {"eval_accuracy", "eval_calibration_error"} <= set(judged)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model" / "final")
    assert [line["step"] for line in read(tmp_path / "ppo" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "ppo" / "final" / "adapter_config.json").exists() == lora
