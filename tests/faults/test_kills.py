"""A run that is killed anywhere goes on as if it had not been."""

import ast
import signal
from pathlib import Path

import pytest

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.checkpoint.atomic import find_damage
from tests.faults.job import STEPS, left, start

ROOT = Path(__file__).parents[2]
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


POINTS = sorted(called())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "run"
    done = start(output)
    assert done.returncode == 0, done.said
    return left(output)


# Which passage of a point is what: `best/` and the checkpoint take turns, and `final/` is last.
# All three are published by the same lines, which every point interrupts for one of them.
BEST, CHECKPOINT, FINAL = "partial-best", "checkpoints/partial-step-00000002", "partial-final"
PASSAGES: dict[str, dict[int, str | None]] = {
    # Within a step there is only what was saved before it, wherever in it that is.
    **{point: {} for point in ("rollout", "reward", "step")},
    **{point: {4: None} for point in ("backward", "stepped")},
    "save-begin": {4: None},
    "save-tensors": {5: BEST, 8: CHECKPOINT},
    "save-models": {3: BEST, 9: FINAL},
    "save-state": {4: CHECKPOINT},
    "save-rename": {3: BEST, 4: CHECKPOINT, 9: FINAL},
    "save-replace": {3: BEST},
    "save-renamed": {4: None, 9: None},
}
# One kill within a step, one after it, and the ones that leave most to mend.
ALWAYS = {("backward", 4), ("save-state", 4), ("save-rename", 9), ("save-replace", 3)}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
    for case in ((point, n) for point in POINTS for n in PASSAGES.get(point, {1: None}))
]


@pytest.mark.fault(1, "resumed from the newest whole checkpoint, bit for bit")
@pytest.mark.fault(2, "resumed from the newest whole checkpoint, bit for bit")
@pytest.mark.fault(14, "at least one whole checkpoint remains, and the run goes on bit for bit")
@pytest.mark.parametrize(("point", "passage"), CASES)
def test_killed_run_resumes_to_uninterrupted_result(tmp_path, unbroken, point, passage) -> None:
    output = tmp_path / "run"
    killed = start(output, f"{point}:kill@{passage}")
    assert killed.returncode == -signal.SIGKILL, killed.said
    checkpoints = output / "checkpoints"
    newest = max((int(path.name[5:]) for path in checkpoints.glob("step-*")), default=0)
    assert (newest > 0) == (point != "lock")
    assert (newest == STEPS) == (passage == 9)
    partial = PASSAGES.get(point, {1: None})[passage]
    assert partial is None or (output / partial).is_dir()
    resumed = start(output, resume_from_checkpoint="latest" if newest else None)
    assert resumed.returncode == 0, resumed.said
    whole = newest + (point == "save-rename" and partial == CHECKPOINT)  # its name was missing
    assert (f"resuming after step {whole}\n" in resumed.said) == (newest > 0)
    assert left(output) == unbroken
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    assert find_damage(checkpoints / names[-1]) is None
    assert find_damage(output / "best") is None
    assert find_damage(output / "final") is None
    assert not list(output.glob("partial-*"))


@pytest.mark.slow
@pytest.mark.fault(
    2, "ten steps are five, a kill, and five, bit for bit: every algorithm, LoRA too"
)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("trainer_type", TRAINERS)
def test_run_killed_at_step_eight_resumes_bit_for_bit(tmp_path, trainer_type, lora) -> None:
    options = {"trainer_type": trainer_type, "max_steps": 10, "save_steps": 5, "eval_steps": 0}
    options |= {"beta": 0.1, "use_peft": lora, "warmup_steps": 3}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole, **options).returncode == 0
    assert start(broken, "stepped:kill@8", **options).returncode == -signal.SIGKILL
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["step-00000005"]
    resumed = start(broken, resume_from_checkpoint="latest", **options)
    assert resumed.returncode == 0, resumed.said
    assert left(broken) == left(whole)
