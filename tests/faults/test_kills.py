"""A run that is killed anywhere goes on as if it had not been."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.faults import POINTS
from rlhf_pg.sealed import verified
from tests.faults.job import STEPS, left, start

ROOT = Path(__file__).parents[2]
WITHIN_A_STEP = {"rollout", "reward", "backward", "step", "stepped"}
TRAINERS = (GRPOTrainer, RLOOTrainer, ReinforceTrainer, PPOTrainer)


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
    assert called() == set(POINTS)


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


@pytest.mark.slow
@pytest.mark.fault(
    2, "ten steps are five, a kill, and five, bit for bit: every algorithm, LoRA too"
)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("trainer_type", TRAINERS)
def test_ten_steps_are_five_a_kill_and_five(tmp_path, trainer_type, lora) -> None:
    options = {"trainer_type": trainer_type, "max_steps": 10, "save_steps": 5, "eval_steps": 0}
    options |= {"beta": 0.1, "use_peft": lora, "warmup_steps": 3}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole, **options).returncode == 0
    assert start(broken, "stepped:kill@8", **options).returncode == -signal.SIGKILL
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["step-00000005"]
    resumed = start(broken, resume_from_checkpoint="latest", **options)
    assert resumed.returncode == 0, resumed.said
    assert left(broken) == left(whole)


@pytest.mark.distributed
@pytest.mark.fault(2, "in two processes too")
def test_two_processes_that_are_killed_end_as_those_that_are_not(tmp_path) -> None:
    def run(name: str, *resume: str, **environment: str) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", "-m", "tests.faults.job", str(tmp_path / name), *resume]
        own = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env = os.environ | own | environment
        return subprocess.run(command, cwd=ROOT, env=env, timeout=300).returncode

    assert run("whole") == 0
    assert run("broken", RLHF_PG_FAULT="stepped:kill@3") != 0
    assert run("broken", "latest") == 0
    assert left(tmp_path / "broken") == left(tmp_path / "whole")
