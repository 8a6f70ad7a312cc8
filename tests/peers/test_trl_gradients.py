"""Gradients of all weights against TRL's own, on one batch: ragged rows of several groups."""

from pathlib import Path

import pytest

from benchmarks.peer.workload import BETAS, Job, Workload, save_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("method", BETAS)
def test_whole_batch_gradient_matches(method: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", minversion="1.16")
    from benchmarks.peer.gradients import difference

    workload = Workload(prompts=3, shortest=5, longest=17, n=4, new=13)
    model = save_model(tmp_path / "model", vocabulary=64, width=64, layers=2)
    job = Job(workload, method, model, 64, "float32", str(tmp_path))
    assert difference(job) < 1e-5
