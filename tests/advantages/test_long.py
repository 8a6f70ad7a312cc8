"""Advantages along rows of thousands of tokens: against loops in float64, and as few operations."""

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_pg.advantages import discounted_returns, gae, n_step, process_group_normalized

DECAYS = [(1.0, 1.0), (0.99, 0.95), (0.999, 1.0), (0.5, 1.0)]  # 0.5^8192 is 0 in every dtype


def rows(width, count=3, dtype=torch.float32):
    """Rewards, values, a mask with holes, and values of the states after the end."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(count, width, generator=generator) > 0.2
    x = torch.rand(2, count, width, generator=generator, dtype=torch.float64).to(dtype)
    rewards, values = torch.where(mask, x, torch.nan)
    return rewards, values, mask, torch.arange(count).to(dtype)


def by_loop(rewards, values, mask, end, gamma, lam):
    """Advantages of GAE, one token after the other, in float64."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        advantage, next_value = 0.0, end[row].item()
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = values[row, t].item()
            delta = rewards[row, t].item() + gamma * next_value - value
            out[row, t] = advantage = delta + gamma * lam * advantage
            next_value = value
    return out


@pytest.mark.parametrize(("gamma", "lam"), DECAYS)
def test_long_row_keeps_precision(gamma, lam) -> None:
    rewards, values, mask, end = rows(8192)
    tolerances = {"rtol": 1e-6, "atol": 1e-7}
    advantages, returns = gae(rewards, values, mask, gamma, lam, end)
    expected = by_loop(rewards, values, mask, end, gamma, lam)
    torch.testing.assert_close(advantages.double(), expected, **tolerances)
    targets = torch.where(mask, expected + values.double(), 0.0)
    torch.testing.assert_close(returns.double(), targets, **tolerances)
    nothing = torch.zeros_like(values)
    expected = by_loop(rewards, nothing, mask, 0 * end, gamma, 1.0)
    paid = discounted_returns(rewards, mask, gamma)
    torch.testing.assert_close(paid.double(), expected, **tolerances)


@pytest.mark.parametrize("n", [128, None])
def test_n_step_on_long_row(n) -> None:
    rewards, values, mask, end = rows(600, 2, torch.float64)
    expected = torch.zeros_like(values)
    for row in range(2):
        columns = mask[row].nonzero().flatten().tolist()
        for k, t in enumerate(columns):
            ahead = columns[k:] if n is None else columns[k : k + n]
            after = columns[k + len(ahead) : k + len(ahead) + 1]
            last = values[row, after[0]] if after else end[row]
            paid = sum(0.99**i * rewards[row, c].item() for i, c in enumerate(ahead))
            expected[row, t] = paid + 0.99 ** len(ahead) * last.item()
    targets = n_step(rewards, values, mask, n, 0.99, end)[1]
    torch.testing.assert_close(targets, expected, rtol=1e-12, atol=0)


def test_padding_leaves_summation_order_unchanged() -> None:
    rewards, values, mask, end = rows(100, dtype=torch.float64)
    wide = [pad(x, (0, 231)) for x in (rewards, values, mask)]
    for narrow, padded in zip(
        gae(rewards, values, mask, 0.99, 0.95, end), gae(*wide, 0.99, 0.95, end), strict=True
    ):
        assert padded[:, :100].equal(narrow)


class Counter(TorchDispatchMode):
    """How many operations are dispatched inside."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def by_steps(rewards, values, mask, _):
    return process_group_normalized(rewards, mask, torch.zeros(len(mask)), mask)


FUNCTIONS = {
    "gae": lambda *x: gae(*x[:3], 0.9, 0.8, x[3]),
    "returns": lambda rewards, values, mask, _: discounted_returns(rewards, mask),
    "n_step": lambda *x: n_step(*x[:3], 200, 0.9, x[3]),
    "n_step to the end": lambda *x: n_step(*x[:3], None, 0.9, x[3]),
    "process_group_normalized": by_steps,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operation_count_hardly_grows_with_length(name) -> None:
    """On a GPU every operation is a launch: a loop over 8192 tokens took half a second."""

    def operations(*shape):
        inputs = rows(*shape)
        with Counter() as counter:
            FUNCTIONS[name](*inputs)
        return counter.number

    assert operations(1024) - operations(512) <= 10
    assert operations(512, 60) == operations(512, 3)
    assert operations(1024) < 250
