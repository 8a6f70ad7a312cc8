"""The numbers of docs/mistakes.md: what a text gives as it is printed, beside what is right."""

import math

import pytest
import torch

from rlhf_pg.advantages import gae
from rlhf_pg.losses import clipped_surrogate
from rlhf_pg.masking import masked_mean, whiten
from tests.numbers import f64


def advantages_of(rewards, values, **options):
    mask = torch.ones(1, len(rewards)).bool()
    return gae(f64([rewards]), f64([values]), mask, **options)[0][0].tolist()


def surrogate(new, old, advantages):
    """Loss and log of tokens with these probabilities, with hardly any clipping."""
    logs = f64([new]).log(), f64([old]).log()
    mask = torch.ones(1, len(new)).bool()
    return clipped_surrogate(*logs, f64([advantages]), mask, epsilon=0.999, epsilon_high=99.0)


def test_gae_discount_exponents_of_segment():
    # T = 3, t = 0, r = 0, 0, 1: the last reward is T - 1 - t = 2 steps away, and not T - t + 1 = 4
    assert advantages_of([0, 0, 1], [0, 0, 0], gamma=0.5, lam=1.0) == [0.25, 0.5, 1]
    assert 0.5 ** (3 - 0 + 1) == 0.0625
    # the same with lambda: (gamma lambda)^2
    assert advantages_of([0, 0, 1], [0, 0, 0], gamma=0.5, lam=0.5)[0] == 0.0625


def test_gae_running_advantage_sign():
    printed, running = [], 0.0
    for reward in (1, 0, 0):  # from the last step to the first; V = 0, gamma = lambda = 1
        running = reward - 0 + 1 * (0 - 1 * running)
        printed.insert(0, running)
    assert printed == [1, -1, 1]
    assert advantages_of([0, 0, 1], [0, 0, 0], lam=1.0) == [1, 1, 1]


def test_gae_last_advantage_of_continuing_segment():
    # r = 1, V = 10 everywhere: delta = 1 at every step, the last included
    advantages = advantages_of([1] * 3, [10] * 3, lam=0.95, bootstrap_value=f64([10]))
    assert advantages == pytest.approx([2.8525, 1.95, 1])  # 1 + .95 * 1.95, 1 + .95, 1
    printed = [0.0]  # `np.where(done, rewards - values, 0.)` in the last column
    for _ in range(2):
        printed.insert(0, 1 + 0.95 * printed[0])
    assert printed == pytest.approx([1.95, 1, 0])


def test_importance_ratio_direction():
    # pi = 3/4, 1/4 and pi_old = 1/2, 1/2; a score of 1 for the first token: E under pi is 3/4
    loss, _ = surrogate([0.75, 0.25], [0.5, 0.5], [1, 0])
    assert -(0.5 * loss).sum().item() == pytest.approx(0.75)
    upside_down = 0.5 * (0.5 / 0.75) * 1
    assert upside_down == pytest.approx(1 / 3)


def test_approx_kl_direction():
    _, metrics = surrogate([0.75, 0.25], [0.5, 0.5], [1, 0])
    old_new = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    new_old = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert (0.5 * metrics["approx_kl"]).sum().item() == pytest.approx(old_new)
    assert (old_new, new_old) == pytest.approx((0.1438, 0.1308), abs=5e-5)


def test_whitening_minibatches_differs_from_whole_batch():
    advantages, ones = f64([1, 2, 3, 4]), torch.ones(4).bool()
    halves = torch.cat([whiten(half, ones[:2]) for half in advantages.split(2)])
    torch.testing.assert_close(halves, f64([-1, 1, -1, 1]), rtol=0, atol=1e-7)
    together = whiten(advantages, ones)  # -1.5, -.5, .5, 1.5 over sqrt(5/4)
    torch.testing.assert_close(together, f64([-3, -1, 1, 3]) / 5**0.5, rtol=0, atol=1e-7)


def test_immediate_reward_minus_value_is_not_advantage():
    rewards, values = [0, 0, 1], [0.5, 0.6, 0.7]
    assert f64(rewards).sub(f64(values)).tolist() == pytest.approx([-0.5, -0.6, 0.3])
    assert advantages_of(rewards, values, lam=0.95) == pytest.approx([0.46575, 0.385, 0.3])


def test_unmasked_mean_is_diluted_by_padding():
    difference = f64([[0.2, 0.2, 0, 0, 0, 0, 0, 0]])
    squares, mask = 0.5 * difference**2, difference > 0
    assert squares.mean().item() == pytest.approx(0.005)
    assert masked_mean(squares, mask).item() == pytest.approx(0.02)
