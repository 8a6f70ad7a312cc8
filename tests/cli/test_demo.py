"""`make demo` installs what it needs and no more."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"deepspeed", "trl", "wandb", "mypy", "vllm", "bitsandbytes", "pytest", "tensorboard"}


def test_demo_installs_no_extra_of_development(tmp_path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    make = ["make", "--no-print-directory", "--dry-run", "demo"]
    said = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.rstrip().endswith("rlhf-pg demo")
    assert ".[" not in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert not names & HEAVY
