"""KL estimators, their values and their gradients, and the controllers of the coefficient."""

import math

import pytest
import torch

from rlhf_pg.kl import AdaptiveKLController, PenaltyKLController, kl_estimate

ESTIMATORS = ["k1", "k2", "k3"]
LOGITS = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64)  # policy over three tokens
REF = torch.tensor([-0.4, 0.5, 0.1], dtype=torch.float64).log_softmax(0)


def estimate(u, estimator):
    """Of one token whose log-probabilities differ by u."""
    ref = torch.tensor(-1.5, dtype=torch.float64)
    return kl_estimate(ref + u, ref, estimator)


def kl(p_log, q_log):
    return (p_log.exp() * (p_log - q_log)).sum()


def gradient(of):
    """Of a function of the policy's log-probabilities, with respect to its logits."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(of(logits.log_softmax(0)), logits)[0]


@pytest.mark.parametrize(
    ("u", "estimator", "expected"),
    [
        (math.log(2), "k1", math.log(2)),
        (math.log(2), "k2", math.log(2) ** 2 / 2),
        (math.log(2), "k3", math.log(2) - 1 / 2),  # e^-u - 1 + u = 1/2 - 1 + log 2
        (-math.log(2), "k1", -math.log(2)),
        (-math.log(2), "k2", math.log(2) ** 2 / 2),
        (-math.log(2), "k3", 1 - math.log(2)),  # 2 - 1 - log 2
        (0.0, "k1", 0.0),
        (0.0, "k2", 0.0),
        (0.0, "k3", 0.0),
    ],
)
def test_estimates_by_hand(u, estimator, expected):
    assert estimate(u, estimator).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_elementwise(estimator):
    logprobs, ref = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    together = kl_estimate(logprobs, ref, estimator)
    for i in range(3):
        torch.testing.assert_close(
            together[:, i], kl_estimate(logprobs[:, i], ref[:, i], estimator)
        )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_kl(estimator):
    policy = LOGITS.log_softmax(0)
    expected = (policy.exp() * kl_estimate(policy, REF, estimator)).sum()
    assert expected.item() == pytest.approx(kl(policy, REF).item(), rel=1e-14)


@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("k1", lambda policy: 0 * policy.sum()),
        ("k2", lambda policy: kl(policy, REF)),
        ("k3", lambda policy: kl(REF, policy)),
    ],
)
def test_expected_gradient_as_a_loss(estimator, target):
    # E[grad k] under a fixed sampling distribution, by enumeration of the three tokens
    as_loss = gradient(lambda p: (p.detach().exp() * kl_estimate(p, REF, estimator)).sum())
    torch.testing.assert_close(as_loss, gradient(target), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("k1", lambda policy: kl(policy, REF)),
        ("k3", lambda policy: kl(policy, REF) - kl(REF, policy)),
    ],
)
def test_expected_policy_gradient_as_a_detached_penalty(estimator, target):
    # E[k grad log pi]
    as_reward = gradient(
        lambda p: (p.detach().exp() * kl_estimate(p, REF, estimator).detach() * p).sum()
    )
    torch.testing.assert_close(as_reward, gradient(target), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_matches_finite_differences(estimator):
    logprobs = (-torch.rand(2, 3, generator=torch.Generator().manual_seed(0))).double()
    ref = (-2 * torch.rand(2, 3, generator=torch.Generator().manual_seed(1))).double()
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, estimator), logprobs)


@pytest.mark.parametrize(
    ("u", "estimator", "value", "slope"),
    [
        (100.0, "k1", 100, 1),
        (100.0, "k2", 5000, 100),
        (100.0, "k3", 99, 1),  # e^-100 - 1 + 100, 1 - e^-100
        (-50.0, "k2", 1250, -50),
        (-50.0, "k3", math.exp(50) - 51, 1 - math.exp(50)),
    ],
)
def test_nothing_is_clamped(u, estimator, value, slope):
    logprob = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    k = kl_estimate(logprob, torch.zeros_like(logprob), estimator)
    k.backward()
    assert k.item() == pytest.approx(value, rel=1e-12)
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-12)


def test_k3_keeps_its_digits_near_zero():
    # u^2/2 - u^3/6 = 5e-13 at u = 1e-6; exp(-u) - 1 + u would be off by 1e-16, 2 parts in 10^4
    u = torch.tensor(1e-6, dtype=torch.float64)
    k3 = kl_estimate(u, torch.zeros_like(u), "k3")
    assert k3.item() == pytest.approx(5e-13, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_dtype_is_kept(estimator, dtype):
    assert (
        kl_estimate(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), estimator).dtype
        == dtype
    )


@pytest.mark.parametrize("estimator", ["k4", "", "K1"])
def test_an_unknown_estimator_is_refused(estimator):
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator)


# ------------------------------------------------------------------------------- controllers


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.6, 0.1001),  # error 0.1: 0.1 * (1 + 0.1 * 100 / 10_000)
        (5.4, 0.0999),
        (60.0, 0.1002),  # error 9, clipped to 0.2
        (0.0, 0.0998),  # error -1, clipped to -0.2
        (-6.0, 0.0998),  # k1 of a sample may be negative
        (6.0, 0.1),
    ],
)
def test_adaptive_controller_moves_with_the_clipped_error(kl, expected):
    controller = AdaptiveKLController(coef=0.1, target=6.0, horizon=10_000)
    controller.update(kl, num_samples=100)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_compounds():
    controller = AdaptiveKLController(coef=1.0, target=1.0, horizon=10)
    controller.update(2.0, num_samples=5)  # 1 * (1 + 0.2 * 0.5) = 1.1
    controller.update(2.0, num_samples=10)  # 1.1 * (1 + 0.2) = 1.32
    controller.update(0.9, num_samples=10)  # 1.32 * (1 - 0.1) = 1.188
    assert controller.coef == pytest.approx(1.188, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 0.5), (1.99, 0.5), (2.0, 1), (3.0, 1), (4.5, 1), (4.51, 2), (100.0, 2)],
)
def test_penalty_controller_halves_below_and_doubles_above(kl, expected):
    controller = PenaltyKLController(coef=1.0, target=3.0)  # bounds 3 / 1.5 = 2 and 3 * 1.5 = 4.5
    controller.update(kl)
    assert controller.coef == expected


def test_penalty_controller_compounds():
    controller = PenaltyKLController(coef=0.2, target=0.01)
    for kl in (1.0, 1.0, 1.0, 0.0):
        controller.update(kl)
    assert controller.coef == pytest.approx(0.8)
