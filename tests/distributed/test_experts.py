"""Experts get the same gradient whatever the number of processes and the backend."""

import pytest

from tests.distributed.launching import COMMON, launch, saved_model
from tests.distributed.runs import SPLITS

pytestmark = pytest.mark.distributed

JOB = COMMON | {
    "algorithm": "grpo",
    "num_generations": 4,
    "prompts_per_step": 5,
    "num_mini_batches": 2,
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run in one process, and the job of it."""
    root = tmp_path_factory.mktemp("experts")
    job = JOB | {"model": saved_model(root / "model", "olmoe")}
    own = job | {"micro_batch_tokens": SPLITS["all"]}
    return launch(root / "one", {"grpo": own})["grpo"], job


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_experts_match_single_process(one, backend, tmp_path):
    alone, job = one
    own = job | {"micro_batch_tokens": SPLITS["one"]}
    two = launch(tmp_path / backend, {"grpo": own}, backend, 2)["grpo"]
    expected = alone.gradients["all"]
    for gradient in two.gradients.values():
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()
    for line, other in zip(two.numbers(), alone.numbers(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
