"""Runs whose batches are sampled ahead: trainer, workers and servers are killed, and the same bits
are left.
"""

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import build, left, start
from tests.rollout.vllm.fake_vllm import FakeVllm

AHEAD = {"rollout_ahead": 2, "rollout_workers": 2, "max_steps": 8, "save_steps": 1, "eval_steps": 3}
KILLS = int(os.environ.get("KILLS", "2"))  # of each kind
POINTS = ("rollout", "reward", "backward", "step", "stepped", "save-tensors", "save-models")
POINTS += ("save-state", "save-rename", "save-renamed")


def judge(completions: list[str], **_: Any) -> list[float]:
    time.sleep(random.SystemRandom().random() / 20)
    return [sum(c in "02468" for c in text) / 6 for text in completions]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Any:
    output = tmp_path_factory.mktemp("unbroken") / "run"
    done = start(output, reward_funcs=judge, **AHEAD)
    assert done.returncode == 0, done.said
    return left(output)


@pytest.mark.slow
@pytest.mark.fault(1, "resumed from the newest whole checkpoint, batches ahead included")
@pytest.mark.parametrize("number", range(KILLS))
def test_trainer_killed_with_batches_ahead_resumes_bit_for_bit(
    tmp_path, unbroken, number: int
) -> None:
    luck, output = random.Random(number), tmp_path / "run"
    fault = f"{luck.choice(POINTS)}:kill@{luck.randint(2, 8)}"
    killed = start(output, fault, reward_funcs=judge, **AHEAD)
    assert killed.returncode == -signal.SIGKILL, killed.said
    there = any((output / "checkpoints").glob("step-*"))
    options = {"resume_from_checkpoint": "latest" if there else None}
    resumed = start(output, reward_funcs=judge, **AHEAD, **options)
    assert resumed.returncode == 0, resumed.said
    assert left(output) == unbroken


def kill_workers(ended: threading.Event, number: int) -> None:
    """Kill a worker of this process twice: a request is tried three times."""
    luck, kills = random.Random(number), 0
    while kills < 2 and not ended.wait(0.2 + 3 * luck.random()):
        listed = ["pgrep", "-P", str(os.getpid()), "-f", "boundary.pool"]
        found = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split()
        for pid in found[:1]:
            os.kill(int(pid), signal.SIGKILL)
            kills += 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_workers_change_no_bit(tmp_path, unbroken, number: int) -> None:
    ended = threading.Event()
    threading.Thread(target=kill_workers, args=(ended, number), daemon=True).start()
    build(str(tmp_path / "run"), reward_funcs=judge, **AHEAD).train()
    ended.set()
    assert left(tmp_path / "run") == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_killed_server_changes_no_bit(tmp_path, number: int) -> None:
    """One of two servers dies at some request, and the other answers with the same ids."""
    ends = []
    for dies in (False, True):
        servers = [FakeVllm(12), FakeVllm(12)]
        after = random.Random(number).randint(4, 40)

        def die(body: Any, server: FakeVllm = servers[number % 2], after: int = after) -> Any:
            return (500, b"died") if server.count("/v1/completions") > after else None

        servers[number % 2].answers |= {"/v1/completions": die} if dies else {}
        output = tmp_path / str(dies)
        options = AHEAD | {"rollout_engine": "vllm_server", "rollout_workers": 0, "eval_steps": 0}
        urls = tuple(server.url for server in servers)
        build(str(output), reward_funcs=judge, vllm_server_base_url=urls, **options).train()
        ends.append(left(output))
        for server in servers:
            server.close()
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("warm_workers")
def test_failed_batch_ends_the_run_at_its_own_step(tmp_path) -> None:
    """Not earlier, when it is sampled; and the checkpoint of the step before it can be resumed."""
    calls = []

    def fails(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        calls.append(trainer_state.global_step)
        if trainer_state.global_step == 2 and len(set(calls)) == 3:
            raise ZeroDivisionError
        return [0.0] * len(completions)

    options = AHEAD | {"rollout_workers": 1, "rollout_ahead": 1, "max_steps": 4, "eval_steps": 0}
    trainer = build(str(tmp_path / "run"), reward_funcs=fails, **options)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        trainer.train()
    assert [line["step"] for line in trainer.history] == [1, 2]
    assert sorted(path.name for path in Path(tmp_path, "run/checkpoints").iterdir())[-1:] == [
        "step-00000002"
    ]
    calls.append(3)
    trainer.train(resume_from_checkpoint="latest")
    assert trainer.history[-1]["step"] == 4
