"""A step of two processes, made again by two."""

from pathlib import Path

import pytest

from tests.distributed.launching import start_two

KEYS = "--max_steps 4 --save_steps 2 --prompts_per_step 6 --num_generations 4 --eval_steps 0"


@pytest.mark.distributed
def test_step_of_two_processes_is_as_it_was(model_path: str, tmp_path: Path) -> None:
    """Each process trains on the rows that it had, in their order."""
    run = str(tmp_path / "run")
    own = ["--output_dir", run, "--model_name_or_path", model_path]
    train = ["train", "grpo_arithmetic", *own, *KEYS.split()]
    for command in (train, ["replay", run, "--step", "4"]):
        processes = start_two("rlhf_pg.cli", [command, command])
        said = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert "step 4: as it was recorded" in said[0]
    assert "step 4" not in said[1]
