"""The lock on a run's directory, and the processes that a run forks."""

import errno
import fcntl
import os
import signal
import time
from contextlib import ExitStack
from multiprocessing import get_context

import pytest

from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.runtime import Runtime

FORK = get_context("fork")


def hold_and_fork(directory, told):
    with run_dir_lock(directory, Runtime()):
        if os.fork() == 0:
            told.send(os.getpid())
        time.sleep(600)


@pytest.mark.fault(15, "forks of a run that was killed do not hold its lock")
def test_fork_of_killed_run_does_not_hold_lock(tmp_path) -> None:
    ours, theirs = FORK.Pipe()
    run = FORK.Process(target=hold_and_fork, args=(tmp_path, theirs))
    run.start()
    theirs.close()  # or the line below waits for one that has died
    fork = ours.recv()
    run.kill()
    run.join()
    try:
        with run_dir_lock(tmp_path, Runtime()):
            assert (tmp_path / "lock").read_text().endswith(f", pid {os.getpid()}\n")
            os.kill(fork, 0)  # it lives
    finally:
        os.kill(fork, signal.SIGKILL)


def test_fork_leaving_run_does_not_release_lock(tmp_path) -> None:
    with ExitStack() as run:
        run.enter_context(run_dir_lock(tmp_path, Runtime()))
        fork = FORK.Process(target=run.close)
        fork.start()
        fork.join()
        assert fork.exitcode == 0
        other = run_dir_lock(tmp_path, Runtime())  # in the same process
        with pytest.raises(ValueError, match=rf"in use .*pid {os.getpid()}\)"), other:
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_unsupported_locks_give_one_warning(tmp_path, monkeypatch, caplog, number) -> None:
    def flock(*_) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_dir_lock(tmp_path, Runtime()):
        pass
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("rlhf_pg")]
    assert f"{tmp_path} cannot be locked" in warning


def test_failed_run_keeps_checkpoints_whose_lines_were_lost(tmp_path) -> None:
    """A full disk drops lines of metrics.jsonl, and may have room for a later checkpoint."""
    saved = tmp_path / "run" / "checkpoints" / "step-00000009"

    def fail() -> None:
        with run_dir_lock(tmp_path / "run", Runtime()):
            (tmp_path / "run" / "metrics.jsonl").touch()
            saved.mkdir(parents=True)
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert saved.is_dir()
