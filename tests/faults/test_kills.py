"""A run that is killed anywhere goes on as if it had not been."""

import ast
import signal
from pathlib import Path

import pytest

from rlhf_pg.faults import POINTS
from rlhf_pg.sealed import verified
from tests.faults.job import STEPS, left, start

ROOT = Path(__file__).parents[2]
WITHIN_A_STEP = {"rollout", "reward", "backward", "step", "stepped"}


def called() -> set[str]:
    """The points that are passed somewhere in the package."""
    nodes = [
        n for f in (ROOT / "rlhf_pg").rglob("*.py") for n in ast.walk(ast.parse(f.read_text()))
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "failpoint"
    }


def test_every_point_is_passed_somewhere() -> None:
    assert called() | WITHIN_A_STEP == set(POINTS)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "run"
    done = start(output)
    assert done.returncode == 0, done.said
    return left(output)


def passage(point: str) -> int:
    """Late enough that there is a checkpoint, of those points that are passed more than once."""
    return 1 if point in ("probe", "save-final", "prune", "pruning", "save-aside") else 3


@pytest.mark.fault(1, "resumed from the newest whole checkpoint, bit for bit")
@pytest.mark.fault(2, "resumed from the newest whole checkpoint, bit for bit")
@pytest.mark.fault(14, "at least one whole checkpoint remains, and the run goes on bit for bit")
@pytest.mark.parametrize("point", sorted(called()))
def test_a_run_that_is_killed_ends_as_the_unbroken_one(tmp_path, unbroken, point) -> None:
    output = tmp_path / "run"
    killed = start(output, f"{point}:kill@{passage(point)}")
    assert killed.returncode == -signal.SIGKILL, killed.said
    assert not (output / "final" / "model.safetensors").exists()
    checkpoints = output / "checkpoints"
    begun = any(checkpoints.glob("step-*"))
    assert begun or point in {"probe", *WITHIN_A_STEP}
    resumed = start(output, resume_from_checkpoint="latest" if begun else None)
    assert resumed.returncode == 0, resumed.said
    assert left(output) == unbroken
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    assert verified(checkpoints / names[-1]) is None
    assert verified(output / "best") is None
