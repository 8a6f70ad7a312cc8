"""Any step of a long run can be made again, by as many processes as one has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay.long_run import CHOSEN, KINDS

ROOT = Path(__file__).parents[2]


def run(command: str, directory: Path, kind: str, processes: int) -> None:
    words = [sys.executable, "-m"]
    if processes > 1:
        words += ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
    words += ["tests.replay.long_run", command, str(directory), kind]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, timeout=1800)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("trained", "again"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_steps_of_a_long_run_are_made_again(
    tmp_path: Path, kind: str, trained: int, again: int
) -> None:
    run("train", tmp_path, kind, trained)
    run("replay", tmp_path, kind, again)
    found = json.loads((tmp_path / "replay.json").read_text())
    assert len(found) == CHOSEN
    assert all(step["ids"] and step["rewards"] for step in found)
    if trained == again:
        assert [step["differs"] for step in found] == [[]] * CHOSEN
