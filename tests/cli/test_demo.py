"""`make demo`: it installs what it needs and no more."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"deepspeed", "trl", "wandb", "mypy", "vllm", "bitsandbytes", "pytest", "tensorboard"}


@pytest.fixture
def commands(tmp_path):
    """commands(): what `make demo` would run in a new clone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def dry() -> str:
        make = ["make", "--no-print-directory", "--dry-run", "demo"]
        done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    return dry


def test_demo_installs_no_extra_of_development(commands) -> None:
    said = commands()
    assert said.rstrip().endswith("rlhf-pg demo")
    assert ".[" not in said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert not names & HEAVY


def test_demo_in_environment_of_development_installs_nothing(commands, tmp_path) -> None:
    marker = tmp_path / ".venv" / ".installed"
    marker.parent.mkdir()
    marker.touch()
    os.utime(marker, (2e9, 2e9))  # newer than what it is made from
    assert "pip install" not in commands()
