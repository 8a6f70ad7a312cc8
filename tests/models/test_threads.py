"""Gradients do not depend on which thread of a CPU is faster."""

from collections.abc import Iterator

import pytest
import torch

from rlhf_pg import PPOTrainer
from rlhf_pg.report.metrics import Meter
from tests.trainers.conftest import make

__all__ = ["make"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_gradient_is_the_same_every_time(make, two_threads: None) -> None:
    """The last state of a prompt adds up the gradients of its completions in one order."""
    trainer = make(PPOTrainer, prompts_per_step=4, num_generations=96)
    batch = trainer.sampler.next_batch(0, Meter())
    experience, _ = trainer.estimate(trainer.learner.score(batch), Meter())
    found = []
    for _ in range(3):
        trainer.learner.accumulate(experience, Meter())
        found.append({n: p.grad.clone() for n, p in trainer.checkpointer.parameters.items()})
        trainer.learner.backend.discard_update()
    for other in found[1:]:
        assert [name for name, x in found[0].items() if not x.equal(other[name])] == []
