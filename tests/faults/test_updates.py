"""Losses and gradients that are not finite. (Of one process alone:
`tests/distributed/test_failing_updates.py`.)"""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rlhf_pg import Callback, PPOTrainer
from rlhf_pg.report.run_files import RunFiles, read

# Of an infinite constant the gradient alone would not tell: it has none.
SHIFTS = {"nan": lambda x: x * math.nan, "inf loss": lambda x: x + math.inf}


class Break(Callback):
    """Breaks the loss of the steps in `steps`, counted from 1; keeps what every step left."""

    def __init__(self, trainer, steps, shift="nan") -> None:
        self.whole, self.steps, self.shift = trainer.objective, steps, SHIFTS[shift]
        self.left = []
        self.prepare(trainer, trainer.state.step + 1)
        trainer.callbacks.append(self)

    def prepare(self, trainer, step) -> None:
        trainer.objective = self.whole
        if step in self.steps:
            trainer.objective = Mock(
                wraps=self.whole, side_effect=lambda *inputs: self.shift(self.whole(*inputs))
            )

    def on_step(self, trainer, metrics) -> None:
        state = [(key, value.clone()) for _, key, value in trainer.learner.backend.state()]
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
    tokens = RunFiles(tmp_path / "run").tokens(2)
    assert tokens.lengths.sum() == len(tokens.ids) > 16
    assert np.isfinite(tokens.numbers["advantage"][tokens.action]).all()


def test_only_nonfinite_update_is_skipped(make, tmp_path) -> None:
    trainer = make(max_steps=1, num_mini_batches=4)
    objective, calls = trainer.objective, []

    def broken(*inputs):
        calls.append(1)
        return objective(*inputs) * (math.nan if len(calls) == 2 else 1.0)

    trainer.objective = Mock(wraps=objective, side_effect=broken)
    trainer.train()
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    assert (line["num_updates"], line["skipped_updates"]) == (3, 1)
    assert math.isfinite(line["grad_norm"])


@pytest.mark.fault(22, "after max_skipped_steps the run ends; the last checkpoint is good")
def test_max_skipped_steps_ends_run_across_resume(make) -> None:
    trainer = make(max_steps=9, save_steps=1, max_skipped_steps=1)
    Break(trainer, {1, 3, 4})
    with pytest.raises(FloatingPointError, match=r"step 4: .* 1 steps? before"):
        trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    resumed = make(max_steps=9, save_steps=1, max_skipped_steps=1)
    resumed.checkpointer.resume("latest", resumed.runtime)
    assert (resumed.state.step, resumed.state.skipped_in_a_row) == (3, 1)
    Break(resumed, {4})
    with pytest.raises(FloatingPointError, match="step 4: "):
        resumed.train("latest")


def test_skipped_passes_over_one_batch_count_as_one_step(make, tmp_path) -> None:
    options = {"num_iterations": 4, "max_skipped_steps": 1, "normalize_values": True}
    bad = make(PPOTrainer, max_steps=3, **options)
    estimator, moments = bad.estimator, []

    def broken(signals):
        moments.append(dict(vars(bad.value_moments)))
        return estimator(signals) * (math.nan if bad.state.step == 1 else 1.0)

    vars(bad)["estimator"] = broken
    bad.train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped_updates"] for line in lines] == [0, 4, 0]
    assert moments[1] == moments[2] != moments[0]  # a mean of what is no number is none
    assert all(p.isfinite().all() for p in bad.learner.module.parameters())


@pytest.mark.fault(30, "the error of torch ends the run; the weights are as before the update")
def test_out_of_memory_leaves_weights_unchanged(make, tmp_path) -> None:
    options = {"micro_batch_tokens": 24, "max_steps": 2}
    whole = make(**options, output_dir=str(tmp_path / "whole"))
    whole.train()
    trainer = make(**options, save_steps=1)
    backward, before = trainer.learner.backend.backward, []

    def lacking(loss):
        if trainer.state.step == 1 and not before:
            before.extend(p.detach().clone() for p in trainer.model.parameters())
        elif trainer.state.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss)

    trainer.learner.backend.backward = lacking
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert all(p.equal(q) for p, q in zip(before, trainer.model.parameters(), strict=True))
    trainer.learner.backend.backward = backward
    trainer.train("latest")  # nor is the first micro-batch in what follows
    pairs = zip(whole.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(p.equal(q) for p, q in pairs)
