"""Gradients do not depend on which thread of a CPU is faster."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlhf_pg.models.critic import ActorCritic, Critic, ValueHead
from rlhf_pg.models.policy import Policy
from rlhf_pg.runtime import Runtime
from tests.models.test_packing import batch_of
from tests.tiny import stir, tiny_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_gradient_is_the_same_every_time(two_threads: None) -> None:
    """The last state of a prompt adds up the gradients of its completions in one order.

    Torch shares out an index in brackets from 32768 numbers on: of hidden states, and of values.
    """
    critic = Critic(None, stir(ValueHead(32, torch.float32)))
    module = ActorCritic(Policy(tiny_model("llama", num_hidden_layers=1)), critic)
    batch = batch_of([[5, 9]], [[[7] * 55, *([[7, 3]] * 600)]])
    weights = torch.randn(2, *batch.completion_ids.shape)
    found = []
    for _ in range(3):
        out = module(batch)
        loss = (weights[0] * out.logprobs + weights[1] * out.values).sum() + out.end_values.sum()
        grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        found.append([grad for grad in grads if grad is not None])
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


def test_small_model_takes_one_thread_unless_environment_says(two_threads, monkeypatch) -> None:
    """A larger one that comes after it has them back."""
    monkeypatch.setattr(Runtime, "threads", None)
    small, large = nn.Linear(8, 8), nn.Linear(1000, 1000)
    runtime = Runtime(cpu=True)
    for given, expected in (("2", [2, 2]), (None, [1, 2])):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        taken = []
        for module in (small, large):
            runtime.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
            taken.append(torch.get_num_threads())
        assert taken == expected
