"""Two processes, in one of which a reward hangs or crashes: neither waits for the other."""

import json

import pytest

from tests.distributed.launching import PATIENCE
from tests.distributed.test_failures import said, started as started

ERRORS = {
    "hangs": "did not return within 1 s (reward_timeout)",
    "exits": "ended its worker process: exit code 3",
    "is_killed": "ended its worker process: exit code -9",
}


@pytest.mark.distributed
@pytest.mark.parametrize("fault", ERRORS)
def test_reward_fault_on_one_rank_ends_both(started, fault) -> None:
    for process in started("worker error", fault):
        assert f"ValueError: rank 1: reward function {fault} {ERRORS[fault]}" in said(process)


@pytest.mark.distributed
@pytest.mark.fault(27, "of several processes, all go on with on_reward_error drop")
def test_dropped_reward_fault_on_one_rank_lets_both_go_on(started, tmp_path) -> None:
    for process in started("worker drop", "is_killed"):
        said_by_it = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, said_by_it
    text = (tmp_path / "metrics.jsonl").read_text()
    shares = [json.loads(line)["rewards/is_killed/failed"] for line in text.splitlines()]
    assert shares == [0.5] * 3  # all that the second process has
