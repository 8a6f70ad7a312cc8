"""The examples in CONTRIBUTING.md are all that a new estimator and a new loss take."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
CASES = {
    "median_of_others": ["tests/advantages/test_formulas.py", "tests/advantages/test_exact.py"],
    "spo": ["tests/losses/test_losses.py", "tests/losses/test_policy_gradients.py"],
}
EACH = list(zip(CASES, DIFFS, strict=True))


@pytest.mark.parametrize(("name", "diff"), EACH, ids=CASES)
def test_new_function_with_test_is_short_diff(tmp_path: Path, name: str, diff: str) -> None:
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    assert 0 < len(changed) <= 20
    for source in ("rlhf_pg", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, tmp_path / source)
    subprocess.run(["git", "apply", "-C1"], cwd=tmp_path, input=diff, text=True, check=True)
    command = [sys.executable, "-m", "pytest", "-k", name, *CASES[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # 5 if no test has the name
