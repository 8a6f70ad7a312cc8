"""Gradients do not depend on which thread of a CPU is faster."""

from collections.abc import Iterator

import pytest
import torch

from rlhf_pg.models import ActorCritic, Critic, Policy
from rlhf_pg.models.critic import ValueHead
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
