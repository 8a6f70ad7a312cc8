"""What is left of a run that something ends between two saves."""

import os
import signal

import pytest
import torch

from rlhf_pg import Callback, PPOTrainer
from rlhf_pg.checkpoint.atomic import find_damage
from tests.faults.test_signals import signalled
from tests.untimed import untimed

HURT = {"disable_dropout": False, "normalize_rewards": True, "warmup_steps": 2}


def in_callback(trainer, error) -> None:
    class Failing(Callback):
        def on_step(self, trainer, metrics) -> None:
            if metrics["step"] == 2:
                raise error

    trainer.callbacks.append(Failing())


def in_backward(trainer, error, finished=2) -> None:
    backward = trainer.learner.backend.backward

    def lacking(loss) -> None:
        if trainer.state.step == finished:
            raise error
        backward(loss)

    trainer.learner.backend.backward = lacking


def in_sampling(trainer, error) -> None:
    roll_out = trainer.sampler.roll_out

    def broken(indices):
        samples = roll_out(indices)
        if trainer.state.step == 2:
            torch.rand(1)
            raise error
        return samples

    trainer.sampler.roll_out = broken


def after_update(trainer, error) -> None:
    next_rate = trainer.learner.next_rate

    def broken(scale) -> None:
        next_rate(scale)
        if trainer.state.step == 3:
            raise error

    trainer.learner.next_rate = broken


ENDS = {
    "a callback": (in_callback, RuntimeError("the disk of the dashboard is full")),
    "out of memory": (in_backward, torch.OutOfMemoryError("CUDA out of memory")),
    "Ctrl-C": (in_sampling, KeyboardInterrupt()),
}


def test_interrupted_run_keeps_all_finished_steps(make, tmp_path) -> None:
    make(output_dir=str(tmp_path / "whole"), **HURT).train()
    for end, (where, error) in ENDS.items():
        run = tmp_path / end
        trainer = make(output_dir=str(run), **HURT)
        where(trainer, error)
        with pytest.raises(type(error)) as left:
            trainer.train()
        assert "Resume from" in "".join(left.value.__notes__)
        (saved,) = (run / "checkpoints").iterdir()
        assert (saved.name, find_damage(saved)) == ("step-00000002", None)
        make(output_dir=str(run), **HURT).train("latest")
        assert untimed(run) == untimed(tmp_path / "whole")


def test_interrupted_step_saves_updates_with_warning(make, tmp_path, caplog) -> None:
    trainer = make(PPOTrainer, normalize_values=True)
    after_update(trainer, RuntimeError("not today"))
    with pytest.raises(RuntimeError, match="not today"):
        trainer.train()
    assert "contains 2 updates of the interrupted step 3" in caplog.text
    resumed = make(PPOTrainer, normalize_values=True)
    assert resumed.checkpointer.resume("latest", resumed.runtime)
    assert (resumed.state.step, resumed.learner.scheduler.last_epoch) == (2, 2)
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(p.equal(q) for p, q in pairs)
    resumed.train("latest")
    assert [line["step"] for line in untimed(tmp_path / "run")] == [1, 2, 3]


SEVERAL = {"save_steps": 2, "save_total_limit": 1, "max_steps": 4}


def test_diverged_run_saves_no_exit_checkpoint(make, tmp_path) -> None:
    trainer = make(**SEVERAL)
    in_backward(trainer, FloatingPointError("the gradient is not finite"), finished=3)
    with pytest.raises(FloatingPointError) as left:
        trainer.train()
    assert not hasattr(left.value, "__notes__")
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-00000002"


def test_exit_checkpoint_keeps_older_one_despite_limit(make, tmp_path) -> None:
    trainer = make(**SEVERAL)
    in_backward(trainer, RuntimeError("not today"), finished=3)
    with pytest.raises(RuntimeError, match="not today"):
        trainer.train()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000002", "step-00000003"]
    make(**SEVERAL).train("latest")
    assert [p.name for p in checkpoints.iterdir()] == ["step-00000004"]


def test_failed_exit_save_warns_and_raises_original_error(make, monkeypatch, caplog) -> None:
    monkeypatch.setenv("RLHF_PG_FAULT", "save-begin:enospc")
    trainer = make()
    in_callback(trainer, RuntimeError("the dashboard is down"))
    with pytest.raises(RuntimeError, match="the dashboard is down"):
        trainer.train()
    assert "since the last checkpoint is lost" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.fault(4, "SIGHUP likewise, with 129")
def test_sighup_saves_checkpoint_and_exits(make, tmp_path) -> None:
    trainer = make(reward_funcs=signalled(signal.SIGHUP, 2))
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 129
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-00000002"


def test_ignored_sighup_stays_ignored(make) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        trainer = make(reward_funcs=signalled(signal.SIGHUP, 1))
        trainer.train()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trainer.state.step == 3


def test_second_sigint_interrupts_exit_save(make, tmp_path, monkeypatch, request) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    trainer = make(reward_funcs=signalled(signal.SIGINT, 2))
    monkeypatch.setattr(
        trainer.checkpointer, "save_models", lambda *_: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (unnamed,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert unnamed.name == "partial-step-00000002"
    with pytest.raises(ValueError, match="no complete checkpoint"):
        make().train("latest")
