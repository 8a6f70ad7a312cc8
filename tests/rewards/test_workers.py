"""Reward functions in processes that can be killed: every fault, injected."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerState

from rlhf_pg.boundary import pool
from rlhf_pg.boundary.pool import Pool
from rlhf_pg.boundary.user_modules import load
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.functions import RewardInputs
from tests.rewards import misbehaving as faults
from tests.rewards.calling import Rewards

ROOT = Path(__file__).parents[2]
PROMPTS = ["p", "p", "p", "q", "q", "q"]
COMPLETIONS = ["a", "bad", "ccc", "a", "bb", "ccc"]
IDS = [[4], [5, 5], [6, 6, 6], [4], [5, 5], [6, 6, 6]]
GROUPS = [0, 0, 0, 1, 1, 1]
LENGTHS = [1, 3, 3, 1, 2, 3]
INPUTS = RewardInputs(PROMPTS, COMPLETIONS, IDS, {})
MASK = pad_rows(IDS, 0)[1]


@pytest.fixture(autouse=True, scope="module")
def pools():
    """The workers of most tests, since each takes long to start."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Pool", lambda count: made.setdefault(count, Pool(count)))
        yield
    made.clear()


def rewards(*functions, workers=1, own=None, **options):
    made = Rewards(list(functions), workers=workers, **options)
    made.pool = own or made.pool
    return made


def totals(made, completions=COMPLETIONS, columns=None, **known):
    known = {"groups": GROUPS} | known
    scores = made(PROMPTS, completions, IDS, columns or {}, **known)
    return sum_step_scores(scores).T.tolist()


def test_function_in_worker_gives_same_scores_as_in_trainer():
    functions = [faults.length, faults.steps, faults.Judge(0.1), faults.returns_awaitable]
    assert totals(rewards(*functions, workers=2)) == totals(Rewards(functions))


def test_function_runs_in_other_process_once_for_each_prompt():
    numbers, sizes = totals(rewards(faults.process, faults.calls, workers=2))
    assert float(os.getpid()) not in numbers
    assert sizes == [3] * 6
    (whole,) = totals(rewards(faults.calls), groups=None)
    assert whole == [6] * 6


def test_worker_has_no_gpu_one_thread_no_heavy_import_and_no_output(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    made = rewards(faults.environment, faults.prints, own=Pool(1))
    assert totals(made) == [[1] * 6, LENGTHS]
    said = capfd.readouterr()
    assert "noise" in said.err
    assert "noise" not in said.out


def test_workers_run_side_by_side(tmp_path):
    made = rewards(faults.meets, workers=2, timeout=20.0)
    assert totals(made, [str(tmp_path)] * 6) == [[1] * 6]


def test_worker_is_told_of_trainer_and_logs():
    state = TrainerState(global_step=3, max_steps=9)
    columns = {"answer": list("uvwxyz")}
    told = replace(INPUTS, columns=columns, ended=[True, False] * 3, state=state)
    result = rewards(faults.sees).score(told, MASK, groups=GROUPS)
    assert result.extra["seen"][:2] == ["3 9 True u", "3 9 False v"]
    assert result.extra["seen"][5] == "3 9 False z"
    assert result.metrics == {"answers": [3.0, 3.0]}


def test_function_of_users_file_runs_in_worker(tmp_path):
    (tmp_path / "helper.py").write_text("BONUS = 7.0\n")
    file = tmp_path / "in_worker.py"
    file.write_text(
        "import helper\ndef bonus(completions):\n    return [helper.BONUS for _ in completions]\n"
    )
    made = rewards(load(f"{file}:bonus"))
    assert totals(made) == [[7] * 6]


FAULTS = {
    faults.hangs_with_the_lock: r"did not return within 0.5 s \(reward_timeout\)",
    faults.raises: "raised KeyError: 'answer'",
    faults.exits: "ended its worker process: exit code 3",
    faults.exits_politely: "raised SystemExit: enough",
    faults.is_killed: "ended its worker process: exit code -9",
    faults.takes_all_memory: "raised MemoryError",
    faults.cannot_be_pickled: "returned <function .*lambda.* for completion 1 of the call",
}
MEMORY = 2**28  # bytes


def short(function, **options):
    hungry = function is faults.takes_all_memory
    timeout, own = (30.0, Pool(1, MEMORY)) if hungry else (0.5, None)
    return rewards(function, faults.process, timeout=timeout, own=own, **options)


@pytest.mark.fault(26, "with reward_timeout: killed, and an error names function and prompt")
@pytest.mark.fault(27, "with reward_workers: an error names function and prompt")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_error_names_function_and_prompt(fault):
    with pytest.raises(ValueError, match=rf"^reward function {fault.__name__} ") as error:
        totals(short(fault))
    assert re.search(FAULTS[fault] + r".* \(prompt 'p'\)($|\n)", str(error.value))


@pytest.mark.fault(27, "with on_reward_error drop the other prompts keep their scores")
@pytest.mark.parametrize(
    "fault", [faults.hangs, faults.is_killed, faults.is_not_a_number], ids=lambda f: f.__name__
)
def test_dropped_failure_leaves_other_scores(fault):
    made = short(fault, on_error="drop")
    (_, before) = totals(made, ["a"] * 6)
    result = made.score(INPUTS, MASK, groups=GROUPS)
    first, numbers = sum_step_scores(result.scores).T.tolist()
    assert [score != score for score in first] == [True] * 3 + [False] * 3
    ended = fault is not faults.is_not_a_number
    assert first[3:] == (LENGTHS[3:] if ended else [1.0] * 3)
    assert result.failed == {fault.__name__: 3, "process": 0}
    assert not result.lost.any()  # the other function has a score for it
    assert fault.__name__ in result.first_failure
    assert set(before).isdisjoint(numbers) == ended  # a new worker
    assert totals(made, ["a"] * 6) == [[1] * 6, numbers]


def test_failure_may_lose_completions_or_be_worth_a_value():
    made = rewards(faults.raises, on_error="value", error_value=-1.0)
    result = made.score(INPUTS, MASK, groups=GROUPS)
    assert sum_step_scores(result.scores).T.tolist() == [[-1, -1, -1, 1, 2, 3]]
    assert result.failed == {"raises": 3}
    result = rewards(faults.raises, on_error="drop").score(INPUTS, MASK, groups=GROUPS)
    assert result.lost.tolist() == [True] * 3 + [False] * 3


def test_worker_that_dies_between_calls_is_replaced():
    made = rewards(faults.process)
    ((number, *_),) = totals(made)
    os.kill(int(number), signal.SIGKILL)
    wait_until_gone(int(number))
    with suppress(ValueError):  # a call that comes before anybody has noticed
        totals(made)
    ((another, *_),) = totals(made)
    assert another not in (number, float(os.getpid()))


def test_time_of_a_call_begins_after_its_import(tmp_path):
    """A worker that was killed imports the function again."""
    text = "import time\ntime.sleep(0.6)\nfrom tests.rewards.misbehaving import hangs\n"
    (tmp_path / "slow.py").write_text(text + "def slow(completions): return hangs(completions)\n")
    made = rewards(load(f"{tmp_path}/slow.py:slow"), own=Pool(1), timeout=0.3)
    with pytest.raises(ValueError, match="did not return within"):
        totals(made)
    assert totals(made, ["a"] * 6) == [[1.0] * 6]


def test_process_that_does_not_start_is_the_failure_of_its_call():
    made = rewards(faults.process, own=Pool(1, ready=faults.breaks))
    with pytest.raises(ValueError, match=r"process cannot be called: .*ZeroDivisionError"):
        totals(made)
    with pytest.raises(ValueError, match=r"process cannot be called"):  # its thread still serves
        totals(made)


def test_children_of_a_killed_worker_die_with_it(tmp_path):
    made = rewards(faults.hangs_with_a_child, timeout=1.0)
    with pytest.raises(ValueError, match="did not return within"):
        totals(made, [str(tmp_path / "child")] * 6)
    wait_until_gone(int((tmp_path / "child").read_text()))


def test_column_that_cannot_be_sent_is_failure():
    made = rewards(faults.Judge(0.0))
    assert totals(made, columns={"odd": [lambda: 0] * 6}) == [LENGTHS]  # it is not asked for
    with pytest.raises(ValueError, match="sees has arguments that cannot be sent to a worker"):
        totals(
            rewards(faults.sees),
            columns={"answer": [lambda: 0] * 6},
            state=TrainerState(global_step=1, max_steps=2),
            ended=[True] * 6,
        )


def test_late_async_function_is_given_up():
    async def late(completions):
        if "bad" in completions:
            await asyncio.sleep(1000)
        return faults.length(completions)

    made = Rewards([late], timeout=0.3, on_error="drop")
    result = made.score(INPUTS, MASK, groups=GROUPS)
    assert re.search(r"late did not return within 0.3 s.*prompt 'p'", result.first_failure)
    assert result.lost.tolist() == [True] * 3 + [False] * 3


def test_cancelled_async_function_is_a_failed_call():
    async def cancelled(completions):
        raise asyncio.CancelledError

    with pytest.raises(ValueError, match="reward function cancelled raised CancelledError"):
        totals(Rewards([cancelled]))


def test_timeout_of_function_itself_is_no_late_call():
    async def times_out(completions):
        raise TimeoutError("the judge sleeps")

    with pytest.raises(ValueError, match="times_out raised TimeoutError: the judge sleeps"):
        totals(Rewards([times_out], timeout=5.0))


def test_function_that_no_worker_can_have_is_refused(monkeypatch):
    def mine(completions):
        return [0.0] * len(completions)

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    with pytest.raises(ValueError, match=r"mine cannot be sent .* '__main__'"):
        rewards(mine)
    with pytest.raises(ValueError, match=r"cannot be sent to a worker .*top level of a file"):
        rewards(lambda completions: [0.0] * len(completions))
    with pytest.raises(ValueError, match="reward_timeout cannot end a call"):
        Rewards([faults.length], timeout=1.0)


def test_function_that_names_environments_stays_in_trainer():
    def judges(environments):
        return [float(os.getpid())] * len(environments)

    made = rewards(judges, faults.sees_no_environments)
    scores, others = totals(made, environments=[threading.Lock()] * 6)
    assert scores == [os.getpid()] * 6
    assert others == LENGTHS


def alive(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie


def wait_until_gone(number):
    deadline = time.monotonic() + 10
    while alive(number):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_end_with_pool():
    made = rewards(faults.process, own=Pool(2))
    ((number, *_),) = totals(made)
    del made
    gc.collect()
    wait_until_gone(int(number))


@pytest.mark.slow
def test_workers_end_with_killed_trainer_in_call(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from rlhf_pg.boundary.pool import Pool\n"
        "from tests.rewards import misbehaving as faults\n"
        "if __name__ != '__main__': raise SystemExit('a worker runs the script')\n"
        "pool = Pool(1)\n"
        "print(pool.schedule(os.getpid).result(), flush=True)\n"
        "pool.schedule(faults.hangs_with_the_lock, ['bad'])\n"
        "time.sleep(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run([sys.executable, script], env=environment, capture_output=True).stdout
    try:
        wait_until_gone(int(output))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(output), signal.SIGKILL)
