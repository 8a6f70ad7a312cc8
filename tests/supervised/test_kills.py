"""Supervised runs that are killed go on to the same weights, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.rewards.test_reward_model import letters
from tests.supervised.test_bradley_terry import pairs
from tests.supervised.test_sft import upper
from tests.tiny import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
@pytest.mark.parametrize("fault", ["save-tensors:kill@3", "save-state:kill@2", "save-begin:kill@2"])
def test_killed_run_resumes_bit_for_bit(tmp_path: Path, algorithm: str, fault: str) -> None:
    tiny_model("llama", scale=0.05).save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    rows = (upper() if algorithm == "sft" else pairs(24)).to_list()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"algorithm": algorithm, "dataset_name": str(tmp_path / "rows.jsonl"), "max_steps": 6}
    keys |= {"batch_size": 8, "dataset_test_split": 0.1, "save_steps": 2, "learning_rate": 1e-3}
    keys["model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))

    def run(name: str, fault: str = "", *flags: str) -> int:
        command = [sys.executable, "-m", "rlhf_pg.cli", "train", str(tmp_path / "run.yaml"), *flags]
        environment = os.environ | {"RLHF_PG_FAULT": fault, "OMP_NUM_THREADS": "1"}
        out = ["--output_dir", str(tmp_path / name)]
        return subprocess.run([*command, *out], env=environment, timeout=120).returncode

    assert run("whole") == 0
    assert run("broken", fault) == -signal.SIGKILL
    assert run("broken", "", "--resume_from_checkpoint", "latest") == 0
    whole, broken = (
        (tmp_path / name / "final" / "model.safetensors").read_bytes()
        for name in ("whole", "broken")
    )
    assert whole == broken
