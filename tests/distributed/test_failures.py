"""Two processes, of which one fails: both end, and both say why."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pg.checkpoint.atomic import find_damage
from tests.distributed.backends import environment
from tests.distributed.launching import OWN, PATIENCE, start_two

FAILING = Path(__file__).with_name("failing.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ENVIRONMENT = os.environ | OWN | environment("ddp")


@pytest.fixture
def started(tmp_path):
    """Starts two processes that no launcher looks after."""
    processes = []

    def start(where: str, how: str, backend: str = "ddp") -> list[subprocess.Popen[str]]:
        arguments = [str(tmp_path), where, how, backend]
        processes.extend(start_two("tests.distributed.failing", [arguments] * 2, backend))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """All that a process that failed has said."""
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    return output


@pytest.mark.distributed
@pytest.mark.fault(25, "all raise it with its process; what was trained is saved")
def test_reward_error_on_one_rank_raises_on_all_and_saves(started, tmp_path) -> None:
    for process in started("reward", "raises"):
        text = said(process)
        assert "ValueError: rank 1: reward function judge raised RuntimeError: the judge is" in text
        assert "cannot go on" not in text  # nobody was ended by another
    state = json.loads((tmp_path / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert state["counters"]["step"] == 1
    assert (tmp_path / "checkpoints" / "step-00000001" / "rng-rank1.safetensors").exists()


@pytest.mark.distributed
@pytest.mark.fault(49, "of several processes, all save after the same step, and end")
def test_killed_launcher_ends_all_after_same_step(tmp_path) -> None:
    command = [*LAUNCHER, FAILING, tmp_path, "reward", "loses_its_launcher"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as launcher:
        said = launcher.stdout.read()  # through the end of all who could say something
    assert launcher.returncode == -signal.SIGKILL
    assert "SIGTERM: --resume_from_checkpoint latest" in said
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert (saved.name, find_damage(saved)) == ("step-00000002", None)


@pytest.mark.distributed
@pytest.mark.fault(6, "all finish the same step, save it and exit with 143")
def test_sigterm_to_one_rank_ends_all_after_same_step(started, tmp_path) -> None:
    for process in started("reward", "is_terminated"):
        output = said(process)
        assert process.returncode == 143
        assert "cannot go on" not in output
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((saved / "state.json").read_text())["counters"]["step"] == 2
    assert (saved / "rng-rank1.safetensors").exists()


@pytest.mark.distributed
def test_callback_error_on_one_rank_ends_other_rank(started) -> None:
    """Rank 1 keeps its connections: rank 0 waits in a collective that will not end by itself."""
    first, _ = started("callback", "is_interrupted")
    text = said(first)
    assert "[rank 0] rank 1 (" in text
    assert "failed: KeyboardInterrupt: the judge has had enough\n" in text
    assert "[rank 0] cannot go on without the others\nStack of MainThread:\n" in text


@pytest.mark.distributed
@pytest.mark.fault(5, "in several processes SIGINT is like SIGTERM, with 130")
def test_sigint_to_all_ranks_saves_one_checkpoint(started, tmp_path) -> None:
    for process in started("all callbacks", "is_interrupted_by_signal"):
        output = said(process)
        assert process.returncode == 130, output
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert find_damage(saved) is None


@pytest.mark.distributed
def test_finished_process_exits_cleanly_despite_gloo_threads() -> None:
    for process in start_two("tests.distributed.leaving", [[], []]):
        output = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, output


@pytest.mark.distributed
@pytest.mark.fault(3, "the other says which process is gone, and ends")
def test_killed_rank_is_reported_by_other_rank(started) -> None:
    first, second = started("reward", "is_killed")
    text = said(first)
    assert "The connection to another process was lost: it was killed" in text
    assert "no answer from ranks [1]" in text
    assert said(second).count("Traceback") == 0


@pytest.mark.distributed
@pytest.mark.fault(
    26,
    "after ddp_timeout all processes report their stacks and end; one that is alone waits, unless "
    "reward_workers and reward_timeout are set",
)
@pytest.mark.fault(29, "after ddp_timeout all report their stacks and end")
def test_hanging_rank_is_reported_with_all_stacks(started) -> None:
    first, second = map(said, started("reward", "sleeps_for_ever"))
    for rank, text in enumerate((first, second)):
        assert f"[rank {rank}] rank 0 (" in text
        place = "gather_objects (ddp_timeout): another process hangs"
        assert f"has waited 8 s in {place}\nStack of" in text
    assert ", in first_error\n" in first
    assert ", in sleeps_for_ever\n" in second
    assert "sleeps_for_ever" not in first


@pytest.mark.distributed
def test_rank_hanging_before_step_times_out_weight_gather(started) -> None:
    """The other begins the step with what it needs for sampling."""
    first, second = map(said, started("begin", "sleeps_for_ever", "fsdp2"))
    for text in (first, second):
        assert "has waited 8 s in _fill (ddp_timeout): another process hangs\nStack of" in text
    assert ", in full_tensor\n" in first
    assert ", in sleeps_for_ever\n" in second
