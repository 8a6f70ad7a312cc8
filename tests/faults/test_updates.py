"""Losses and gradients that are not finite. (Of one process alone:
`tests/distributed/test_failing_updates.py`.)"""

import math
import random

import numpy as np
import pytest
import torch

from rlhf_pg import Callback, PPOTrainer
from rlhf_pg.report.run_files import RunFiles, read
from tests.untimed import untimed

SHIFTS = {"nan": lambda x: x * math.nan, "inf gradient": lambda x: x * math.inf}
# The gradient alone would not tell: a constant has none.
SHIFTS["inf loss"] = lambda x: x + math.inf


class Break(Callback):
    """Breaks the loss of the steps in `steps`, counted from 1; keeps what every step left."""

    def __init__(self, trainer, steps, shift="nan") -> None:
        self.loss, self.steps, self.shift = trainer.learner.loss, steps, SHIFTS[shift]
        self.left = []
        self.prepare(trainer, trainer.state.step + 1)
        trainer.callbacks.append(self)

    def prepare(self, trainer, step) -> None:
        def broken(new, batch):
            per_token, metrics = self.loss(new, batch)
            return self.shift(per_token), metrics

        trainer.learner.loss = broken if step in self.steps else self.loss

    def on_step(self, trainer, metrics) -> None:
        state = [(key, value.clone()) for _, key, value in trainer.learner.trained.state()]
        weights = [("", p.detach().clone()) for p in trainer.model.parameters()]
        self.left.append(weights + state)
        self.prepare(trainer, metrics["step"] + 1)


def same(some, others) -> bool:
    return all(a == b and x.equal(y) for (a, x), (b, y) in zip(some, others, strict=True))


@pytest.mark.fault(20, "the update is skipped and counted, and its batch kept; the run goes on")
@pytest.mark.parametrize("shift", SHIFTS)
def test_nonfinite_update_is_skipped_without_trace(make, tmp_path, shift) -> None:
    trainer = make(max_steps=3)
    left = Break(trainer, {2}, shift).left
    trainer.train()
    assert same(left[0], left[1])
    assert not any(a[1].equal(b[1]) for a, b in zip(left[1], left[2], strict=True) if b[0])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_updates"] for line in lines] == [0, 1, 0]
    assert [line["num_updates"] for line in lines] == [1, 0, 1]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False]
    # The schedule goes by steps, like all that is planned for the run.
    assert trainer.learner.scheduler.last_epoch == 3


def test_skipped_update_keeps_its_batch_in_the_record(make, tmp_path) -> None:
    seen = []

    def reward(completions, completion_ids, **_):
        seen.extend(completion_ids)
        return [float(len(text)) for text in completions]

    trainer = make(max_steps=1, reward_funcs=reward)
    Break(trainer, {1})
    trainer.train()
    tokens = RunFiles(tmp_path / "run").tokens(1)
    assert len(seen) == 16
    assert [row.tolist() for row in np.split(tokens.ids, tokens.lengths.cumsum())[:-1]] == seen
    assert np.isfinite(tokens.numbers["advantage"][tokens.action]).all()


def test_only_nonfinite_update_is_skipped(make, tmp_path) -> None:
    trainer = make(max_steps=1, num_mini_batches=4)
    loss, calls = trainer.learner.loss, []

    def broken(new, batch):
        calls.append(1)
        per_token, metrics = loss(new, batch)
        return per_token * (math.nan if len(calls) == 2 else 1.0), metrics

    trainer.learner.loss = broken
    trainer.train()
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    assert (line["num_updates"], line["skipped_updates"]) == (3, 1)
    assert math.isfinite(line["grad_norm"])


@pytest.mark.fault(22, "after max_skipped_steps the run ends; the last checkpoint is good")
def test_max_skipped_steps_ends_run_across_resume(make) -> None:
    trainer = make(max_steps=9, save_steps=1, max_skipped_steps=2)
    Break(trainer, {1, 2, 4, 5, 6})
    with pytest.raises(FloatingPointError, match=r"step 6: .* 2 steps before"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    resumed = make(max_steps=9, save_steps=1, max_skipped_steps=2)
    resumed.checkpointer.resume("latest", resumed.runtime)
    assert (resumed.state.step, resumed.state.skipped_in_a_row) == (5, 2)
    Break(resumed, {6})
    with pytest.raises(FloatingPointError, match="step 6: "):
        resumed.train("latest")
    fresh = make(max_steps=6)
    assert fresh.checkpointer.resume("latest", fresh.runtime)


def test_skipped_passes_over_one_batch_count_as_one_step(make, tmp_path) -> None:
    options = {"num_iterations": 4, "max_skipped_steps": 1, "normalize_values": True}
    bad = make(PPOTrainer, max_steps=3, **options)
    estimator, moments = bad.estimator, []

    def broken(signals):
        moments.append(dict(vars(bad.value_moments)))
        return estimator(signals) * (math.nan if bad.state.step == 1 else 1.0)

    bad.estimator = broken
    bad.train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_updates"] for line in lines] == [0, 4, 0]
    assert moments[1] == moments[2] != moments[0]  # a mean of what is no number is none
    assert all(p.isfinite().all() for p in bad.learner.module.parameters())


@pytest.mark.fault(30, "the error of torch ends the run; the weights are as before the update")
def test_out_of_memory_leaves_weights_unchanged(make, tmp_path) -> None:
    whole = make(micro_batch_tokens=24, output_dir=str(tmp_path / "whole"))
    whole.train()
    trainer = make(micro_batch_tokens=24, save_steps=1)
    backward, before = trainer.learner.trained.backward, []

    def lacking(loss):
        if trainer.state.step == 1 and not before:
            before.extend(p.detach().clone() for p in trainer.model.parameters())
        elif trainer.state.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss)

    trainer.learner.trained.backward = lacking
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert all(p.equal(q) for p, q in zip(before, trainer.model.parameters(), strict=True))
    trainer.learner.trained.backward = backward
    trainer.train("latest")  # nor is the first micro-batch in what follows
    pairs = zip(whole.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(p.equal(q) for p, q in pairs)


def test_interrupted_step_restarts_with_same_random_state(make, tmp_path) -> None:
    """A step is taken again from where it began, random numbers included."""
    broken = []

    def reward(completions, **_):
        scores = [random.random() for _ in completions]
        if broken:
            raise RuntimeError("not today")
        return scores

    options = {"reward_funcs": reward, "save_steps": 2}
    make(**options, output_dir=str(tmp_path / "whole")).train()
    trainer = make(**options)
    step = trainer.step

    def second():
        broken.extend([True] * (trainer.state.step == 1))
        return step()

    trainer.step = second
    with pytest.raises(ValueError, match=r"(?s)not today.*Resume from .*step-00000001 "):
        trainer.train()
    broken.clear()
    make(**options).train("latest")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


def test_reward_error_after_save_reuses_checkpoint(make, tmp_path) -> None:
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("not today")
        return [1.0] * len(completions)

    def saved():
        return (tmp_path / "run" / "checkpoints" / "step-00000001").stat().st_ino

    class Look(Callback):
        def on_save(self, trainer, path) -> None:
            seen.append(saved())

    seen = []
    with pytest.raises(ValueError, match=r"(?s)not today.*Resume from .*step-00000001 "):
        make(reward_funcs=reward, save_steps=1, callbacks=[Look()]).train()
    assert seen == [saved()]
