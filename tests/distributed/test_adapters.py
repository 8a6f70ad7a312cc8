"""Adapters that change embedding or head, under backends whose base no process has whole."""

from typing import Any

import pytest

from tests.distributed.launching import COMMON, launch, saved_model

pytestmark = pytest.mark.distributed

JOB = {"algorithm": "grpo", "num_generations": 4, "prompts_per_step": 5, "beta": 0.05}
JOB |= {"gradients": False, "save_steps": 3}
# The reference shares the base, but has a head of its own; the base's head is saved beside LoRA's.
ADAPTERS: dict[str, dict[str, Any]] = {
    "trained head": {"modules_to_save": ["lm_head"]},
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_adapter_of_the_head_trains_as_in_one_process(tmp_path, backend: str) -> None:
    common = COMMON | JOB | {"model": saved_model(tmp_path / "model")}
    jobs = {name: common | {"lora": options} for name, options in ADAPTERS.items()}
    expected = launch(tmp_path / "one", jobs)
    found = launch(tmp_path / "two", jobs, backend, 2)
    for name in jobs:
        moved = (expected[name].end - expected[name].start).norm()
        assert moved > 0
        assert (found[name].end - expected[name].end).norm() <= 1e-4 * moved
