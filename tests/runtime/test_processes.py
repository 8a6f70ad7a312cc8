"""What the processes of a run agree on; tests/distributed has it in several processes."""

import pytest

from rlhf_pg.runtime import Runtime


def test_error_raised_together_is_shared() -> None:
    runtime = Runtime()
    runtime.world, runtime.first_error = 2, lambda failure: failure
    with pytest.raises(ValueError, match="no score") as raised, runtime.raise_together(ValueError):
        raise ValueError("no score")
    assert runtime.is_shared(raised.value)
    assert not runtime.is_shared(ValueError("no score"))


@pytest.mark.parametrize(("address", "is_told"), [("127.0.0.1", True), ("node0", False)])
def test_launcher_that_started_one_process_of_several_is_reported(
    address, is_told, monkeypatch, caplog
) -> None:
    """Such as `accelerate launch --cpu --num_processes 2`; a cluster has an address of its own."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    Runtime()
    assert ("torchrun --nproc_per_node" in caplog.text) == is_told
