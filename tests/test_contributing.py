"""The examples in CONTRIBUTING.md are all that a new estimator and a new loss take."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
NAMES = ("median_of_others", "spo")
TESTS = [
    *(f"tests/advantages/test_{name}.py" for name in ("formulas", "exact")),
    *(f"tests/losses/test_{name}.py" for name in ("losses", "policy_gradients")),
]


def test_new_estimator_and_loss_with_tests_are_short_diffs(tmp_path: Path) -> None:
    for source in ("rlhf_pg", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, tmp_path / source)
    for name, diff in zip(NAMES, DIFFS, strict=True):
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]
        assert 0 < len(changed) <= 20, name
        subprocess.run(["git", "apply", "-C1"], cwd=tmp_path, input=diff, text=True, check=True)
    command = [sys.executable, "-m", "pytest", "-vv", "-k", " or ".join(NAMES), *TESTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [name for name in NAMES if not re.search(rf"{name}\S* PASSED", done.stdout)] == []
