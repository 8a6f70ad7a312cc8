"""Checkpoints of two processes that are killed, or of which one has another disk."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.launching import PATIENCE, start_two
from tests.faults.job import STEPS, left

pytestmark = pytest.mark.distributed


def run(
    outputs: Sequence[Path], *resume: str, faults: Sequence[str] = ("", "")
) -> list[tuple[int, str]]:
    """Exit status of both processes, and all that they said; each has its own `output_dir`."""
    processes = start_two(
        "tests.faults.job", [[str(output), *resume] for output in outputs], faults=faults
    )
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert [code for code, _ in run([output] * 2)] == [0, 0]
    return output


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.fault(7, "on one of two processes: the same error on both")
@pytest.mark.fault(13, "passed over with a warning, by all processes")
def test_checkpoint_failure_on_one_rank_is_shared_by_all(whole, tmp_path) -> None:
    broken = tmp_path / "broken"
    for code, text in run([broken] * 2, faults=("", "save-tensors:enospc@4")):
        assert code not in (None, 0)
        assert "step-00000002 could not be saved (OSError: [Errno 28]" in text
        assert "cannot go on" not in text  # nobody was ended by another
    assert names(broken) == ["step-00000001", "step-00000002"]  # it was tried again on the way out
    assert [code for code, _ in run([broken] * 2, "latest")] == [0, 0]
    assert left(broken) == left(whole)

    newest = broken / "checkpoints" / f"step-{STEPS:08d}"
    (newest / "rng-rank1.safetensors").unlink()
    (first, text), (second, _) = run([broken] * 2, "latest")
    assert (first, second) == (0, 0)
    assert "rng-rank1.safetensors" in text
    assert left(broken) == left(whole)


@pytest.mark.slow
@pytest.mark.fault(2, "in two processes too")
def test_killed_processes_resume_to_same_result(whole, tmp_path) -> None:
    broken = tmp_path / "broken"
    killed = run([broken] * 2, faults=("stepped:kill@3", "stepped:kill@3"))
    codes = {code for code, _ in killed}  # one may be killed while the other still needs it
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    assert names(broken) == ["step-00000001", "step-00000002"]
    assert [code for code, _ in run([broken] * 2, "latest")] == [0, 0]
    assert left(broken) == left(whole)


def test_unshared_output_dir_fails_without_saving(tmp_path) -> None:
    outputs = [tmp_path / "one", tmp_path / "two"]
    for code, text in run(outputs):
        assert code not in (None, 0)
        assert "rank 1: " in text
        assert "could not be saved (" in text
        assert "every process" in text
    assert not list(tmp_path.rglob("model.safetensors"))
