"""The example in CONTRIBUTING.md is all that a new estimator takes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIFF = re.search(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def test_a_new_estimator_is_a_short_diff_with_its_test(tmp_path: Path) -> None:
    assert DIFF is not None
    changed = [line for line in DIFF[1].splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    assert 0 < len(changed) <= 15
    for name in ("rlhf_pg", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply", "-C1"], cwd=tmp_path, input=DIFF[1], text=True, check=True)
    tests = ["tests/advantages/test_formulas.py", "tests/advantages/test_exact.py"]
    command = [sys.executable, "-m", "pytest", "-k", "median_of_others", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # 5 if no test has the name
