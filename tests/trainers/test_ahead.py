"""Batches sampled ahead by older weights: which ones, by rule alone, and what a stop leaves."""

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_pg import GRPOTrainer
from tests.trainers.conftest import digits
from tests.untimed import untimed

LUCK = random.SystemRandom()  # a trainer seeds the others
AHEAD = {"rollout_ahead": 1, "rollout_workers": 1, "max_steps": 4, "learning_rate": 1e-2}


def digest(trainer: Any) -> str:
    own = [p.detach().numpy().tobytes() for p in trainer.learner.module.parameters()]
    return hashlib.sha256(b"".join(own)).hexdigest()


def slow_digits(completions: list[str], **_: Any) -> list[float]:
    time.sleep(LUCK.random() / 10)
    return digits(completions)


@pytest.mark.parametrize("depth", [1, 2])
def test_batch_is_sampled_by_the_weights_of_its_rule(make, depth: int) -> None:
    """Step n trains on samples of the weights after step n - depth, or of the first ones."""
    trainer = make(GRPOTrainer, **AHEAD | {"rollout_ahead": depth, "dtype": "float64"})
    weights, gaps = [], []

    def learn(batch: Any, meter: Any) -> Any:
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        step, now = trainer.state.step, weights[-1]
        for n, old in ((max(0, step - depth), 0), (step, 1)):
            trainer.model.load_state_dict(weights[n], strict=False)
            scored = trainer.learner.score(batch).old_logprobs
            if scored is None:
                scored = trainer.learner.trained(batch).logprobs
            gap = (scored - batch.sampler_logprobs).abs()[batch.action_mask].max()
            gaps.append((step, old, float(gap)))
        trainer.model.load_state_dict(now, strict=False)
        return real(batch, meter)

    real, trainer.learn = trainer.learn, learn
    trainer.train()
    for step, now, gap in gaps:
        assert (gap < 1e-10) == (not now or step == 0)
    assert [line["sampling/staleness"] for line in trainer.history] == [
        min(step, depth) for step in range(4)
    ]
    assert trainer.history[0]["sampling/effective_sample_size"] == pytest.approx(1)
    assert all(line["sampling/effective_sample_size"] < 1 for line in trainer.history[1:])


def test_neither_workers_nor_delays_change_a_bit(make, tmp_path: Path) -> None:
    runs = []
    for workers in (1, 2, 3):
        directory = tmp_path / str(workers)
        options = AHEAD | {"rollout_workers": workers, "num_iterations": 2}
        trainer = make(reward_funcs=slow_digits, output_dir=str(directory), **options)
        trainer.train()
        runs.append((digest(trainer), untimed(directory)))
    assert runs[0] == runs[1] == runs[2]
