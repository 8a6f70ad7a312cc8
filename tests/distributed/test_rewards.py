"""Two processes, in one of which a reward hangs or crashes: neither waits for the other."""

import json

import pytest

from tests.distributed.launching import PATIENCE, start_two

ERRORS = {
    "hangs": "did not return within 1 s (reward_timeout)",
    "exits": "ended its worker process: exit code 3",
    "is_killed": "ended its worker process: exit code -9",
}


@pytest.fixture
def finished(tmp_path):
    """Runs two processes to their end, and returns what they said."""
    processes = []

    def run(fault: str, on_error: str) -> list[tuple[int, str]]:
        arguments = [str(tmp_path), fault, on_error]
        processes.extend(start_two("tests.distributed.failing_rewards", [arguments] * 2))
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        codes = [process.returncode for process in processes]
        return list(zip(codes, outputs, strict=True))

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.distributed
@pytest.mark.parametrize("fault", ERRORS)
def test_reward_fault_on_one_rank_ends_both(finished, fault) -> None:
    for code, said in finished(fault, "error"):
        assert code != 0
        assert f"ValueError: rank 1: reward function {fault} {ERRORS[fault]}" in said


@pytest.mark.distributed
@pytest.mark.fault(27, "of several processes, all go on with on_reward_error drop")
def test_dropped_reward_fault_on_one_rank_lets_both_go_on(finished, tmp_path) -> None:
    assert [code for code, _ in finished("is_killed", "drop")] == [0, 0]
    text = (tmp_path / "metrics.jsonl").read_text()
    shares = [json.loads(line)["rewards/is_killed/failed"] for line in text.splitlines()]
    assert shares == [0.5, 0.5]  # all that the second process has
