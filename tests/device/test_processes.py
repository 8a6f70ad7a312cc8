"""Two pretend GPUs, launched as users launch them, give the numbers of one CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.conftest import ROOT
from tests.device.test_runs import distance

RUNS = ["ppo"]


def launched(config: str, path: Path) -> dict[str, dict[str, Any]]:
    """The numbers of `RUNS`, by `accelerate launch`."""
    own = {
        "PRETEND_CUDA": "2",
        "PYTHONPATH": f"{ROOT / 'tests/device/site'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    file = path / "numbers.jsonl"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(ROOT / f"recipes/accelerate/{config}.yaml")]
    command += ["--main_process_port", "0", "-m", "tests.device.runs", str(file), *RUNS]
    done = subprocess.run(
        command, env=os.environ | own, cwd=ROOT, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {made["name"]: made for made in map(json.loads, file.read_text().splitlines())}


SLOW = [pytest.param(config, marks=pytest.mark.slow) for config in ("ddp", "zero2", "zero3")]


@pytest.mark.parametrize("config", ["fsdp2", *SLOW])
def test_two_gpus_match_one_cpu(expected: Any, config: str, tmp_path: Path) -> None:
    there = launched(config, tmp_path)
    for run in RUNS:
        assert there[run]["device"] == "cuda:0"
        assert distance(there[run], expected[run]) <= 1e-4
