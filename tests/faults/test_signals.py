"""Signals during a run, and launchers that leave it alone.

Several processes: `tests/distributed/test_failures.py`.
"""

import os
import signal
import threading
import time
from multiprocessing import get_context

import pytest

from rlhf_pg.checkpoint.atomic import find_damage
from rlhf_pg.runtime.termination import POLL, SAME, TOLD
from tests.faults.job import start
from tests.trainers.conftest import digits
from tests.untimed import untimed


def signalled(number: int, step: int):
    """The reward, which sends this process a signal in a step counted from 1."""
    calls = []

    def reward(completions, **columns):
        calls.append(1)
        if len(calls) == 4 * step - 3:  # of the first prompt
            os.kill(os.getpid(), number)
        return digits(completions, **columns)

    reward.__name__ = "digits"
    return reward


@pytest.mark.fault(4, "the step is finished, a checkpoint saved, and the exit code is 143")
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("ahead", [0, 1])
def test_sigterm_saves_and_resume_matches_uninterrupted_run(make, tmp_path, ahead: int) -> None:
    options = {"rollout_ahead": ahead, "rollout_workers": ahead}
    make(output_dir=str(tmp_path / "whole"), **options).train()
    before = signal.getsignal(signal.SIGTERM)
    broken = make(reward_funcs=signalled(signal.SIGTERM, 2), **options)
    with pytest.raises(SystemExit) as left:
        broken.train()
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    step = broken.state.step  # a batch ahead may be rewarded during the step before
    assert 2 - ahead <= step == len(untimed(tmp_path / "run")) <= 2
    make(**options).train(resume_from_checkpoint="latest")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


def test_signal_during_the_last_report_ends_the_caller(make, tmp_path, monkeypatch) -> None:
    def write(*_, running: bool = False, **__) -> None:
        if not running:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("rlhf_pg.report.run_page.write_report", write)
    with pytest.raises(SystemExit) as left:
        make(max_steps=1).train()
    assert left.value.code == 143
    assert (tmp_path / "run/final/state.json").is_file()


def test_sigterm_on_save_step_saves_once(make) -> None:
    trainer = make(save_steps=1, reward_funcs=signalled(signal.SIGTERM, 1))
    saved, save = [], trainer.checkpointer.save
    trainer.checkpointer.save = lambda *args, **options: saved.append(1) or save(*args, **options)
    with pytest.raises(SystemExit):
        trainer.train()
    assert saved == [1]


@pytest.fixture
def interruptible():
    """A shell starts what it puts into the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.fault(5, "the first SIGINT is like SIGTERM, with 130")
def test_sigint_finishes_step_and_saves_it(make, tmp_path, interruptible, capfd) -> None:
    trainer = make(reward_funcs=signalled(signal.SIGINT, 2))
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 130
    assert TOLD.decode() in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.fault(5, "a second SIGINT breaks the step off at once; the checkpoints are whole")
def test_second_sigint_ends_at_once(make, tmp_path, interruptible) -> None:
    calls = []

    def reward(completions, **columns):
        calls.append(1)
        for _ in range(2 * (len(calls) == 9)):
            os.kill(os.getpid(), signal.SIGINT)
        return digits(completions, **columns)

    with pytest.raises(KeyboardInterrupt):
        make(reward_funcs=reward, save_steps=1).train()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000001", "step-00000002"]
    assert find_damage(checkpoints / "step-00000002") is None
    assert len(untimed(tmp_path / "run")) == 2


def test_sigterm_ends_fork_of_reward_function(make) -> None:
    """As `multiprocessing.Pool` does when it is left, here while the fork is deep in C code."""
    codes = []

    def reward(completions, **_):
        fork = get_context("fork")
        runs = fork.Event()
        child = fork.Process(target=lambda: (runs.set(), sum(range(10**10))))
        child.start()
        runs.wait()
        child.terminate()
        child.join(10)
        codes.append(child.exitcode)
        child.kill()
        return [0.0] * len(completions)

    trainer = make(max_steps=1, reward_funcs=reward)
    trainer.train()
    assert codes == [-signal.SIGTERM] * 4


def test_sigterm_during_final_save_exits_after_saving(make, tmp_path, monkeypatch) -> None:
    trainer = make(max_steps=1)
    save = trainer.checkpointer.save_models

    def signalled(*args, **options):
        if "final" in options:
            os.kill(os.getpid(), signal.SIGTERM)
        save(*args, **options)

    monkeypatch.setattr(trainer.checkpointer, "save_models", signalled)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    assert find_damage(tmp_path / "run" / "final") is None
    make(max_steps=1).train("latest")  # whatever started it may begin it again


@pytest.mark.fault(5, "a second SIGTERM ends the process at once; the last checkpoint is whole")
def test_second_sigterm_kills_process_at_once(tmp_path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"

    def reward(completions, **_):
        if checkpoints.exists():  # in the second step
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(SAME + 0.1)
            print("still here")
        return [0.0] * len(completions)

    done = start(tmp_path / "run", reward_funcs=reward, eval_steps=0)
    assert done.returncode == -signal.SIGTERM, done.said
    assert "still here" not in done.said
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]
    assert find_damage(checkpoints / "step-00000001") is None


def test_training_in_thread_keeps_signal_handlers(make) -> None:
    seen = []

    def reward(completions, **_):
        seen.append(signal.getsignal(signal.SIGTERM))
        return [0.0] * len(completions)

    trainer = make(max_steps=1, reward_funcs=reward)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.step == 1
    assert set(seen) == {signal.getsignal(signal.SIGTERM)}


@pytest.mark.fault(49, "its process saves after the step that it is in, and ends")
def test_killed_launcher_ends_worker_after_step(tmp_path) -> None:
    """A launcher of one process does not pass SIGTERM on."""
    run = tmp_path / "run"

    def reward(completions, **_):
        if os.getppid() == launcher[0] and run.joinpath("metrics.jsonl").read_text():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3 * POLL)
        return [0.0] * len(completions)

    def launch() -> None:
        launcher.append(os.getpid())
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        start(run, reward_funcs=reward, eval_steps=0, save_steps=0)

    launcher: list[int] = []
    ours, theirs = os.pipe()  # closed when the worker is gone, which is not our child
    process = get_context("fork").Process(target=launch)
    process.start()
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    process.join()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (run / "final").exists()
