"""The KL as an estimate and as a loss: values, and the gradients that they promise."""

import math

import pytest
import torch
from hypothesis import given

from rlhf_pg.kl import DIVERGENCES, KL_LOSSES, divergence, kl_estimate, kl_loss
from tests.advantages import tabular
from tests.numbers import few, tokens

NAN = float("nan")
LOGITS = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64)  # policy over three tokens
REF = torch.tensor([-0.4, 0.5, 0.1], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([-0.1, -0.6, 0.4], dtype=torch.float64).log_softmax(0)
each_loss = pytest.mark.parametrize("estimator", KL_LOSSES)


def estimate(u, estimator):
    """Of one token whose log-probabilities differ by u."""
    ref = torch.tensor(-1.5, dtype=torch.float64)
    return kl_estimate(ref + u, ref, estimator)


def kl(p_log, q_log):
    return (p_log.exp() * (p_log - q_log)).sum()


def gradient(of, logits=LOGITS):
    """Of a function of the policy's log-probabilities, with respect to its logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(of(logits.log_softmax(0)), logits)[0]


@pytest.mark.proves("rlhf_pg.kl.kl_estimate")
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


@pytest.mark.proves("rlhf_pg.kl.kl_estimate")
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_kl(estimator):
    policy = LOGITS.log_softmax(0)
    expected = (policy.exp() * kl_estimate(policy, REF, estimator)).sum()
    assert expected.item() == pytest.approx(kl(policy, REF).item(), rel=1e-14)


@pytest.mark.proves("rlhf_pg.kl.kl_estimate")
@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("k1", lambda policy: 0 * policy.sum()),
        ("k2", lambda policy: kl(policy, REF)),
        ("k3", lambda policy: kl(REF, policy)),
    ],
)
def test_expected_gradient_as_loss(estimator, target):
    # E[grad k] under a fixed sampling distribution, by enumeration of the three tokens
    as_loss = gradient(lambda p: (p.detach().exp() * kl_estimate(p, REF, estimator)).sum())
    torch.testing.assert_close(as_loss, gradient(target), rtol=1e-12, atol=1e-15)


@pytest.mark.proves("rlhf_pg.kl.kl_estimate")
@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("k1", lambda policy: kl(policy, REF)),
        ("k2", lambda policy: (policy.exp() * (policy - REF) ** 2 / 2).sum() - kl(policy, REF)),
        ("k3", lambda policy: kl(policy, REF) - kl(REF, policy)),
    ],
)
def test_expected_policy_gradient_as_detached_penalty(estimator, target):
    # E[k grad log pi]
    as_reward = gradient(
        lambda p: (p.detach().exp() * kl_estimate(p, REF, estimator).detach() * p).sum()
    )
    torch.testing.assert_close(as_reward, gradient(target), rtol=1e-12, atol=1e-15)


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
def test_estimates_are_not_clamped(u, estimator, value, slope):
    logprob = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    k = kl_estimate(logprob, torch.zeros_like(logprob), estimator)
    k.backward()
    assert k.item() == pytest.approx(value, rel=1e-12)
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-12)


def test_k3_keeps_precision_near_zero():
    # u^2/2 - u^3/6 = 5e-13 at u = 1e-6; exp(-u) - 1 + u would be off by 1e-16, 2 parts in 10^4
    u = torch.tensor(1e-6, dtype=torch.float64)
    k3 = kl_estimate(u, torch.zeros_like(u), "k3")
    assert k3.item() == pytest.approx(5e-13, rel=1e-6, abs=0)


@pytest.mark.parametrize("estimator", ["k4", "", "K1"])
def test_unknown_estimator_raises(estimator):
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator)


# ------------------------------------------------------------------------- as a loss: one prefix


def expected(estimator, old):
    """Gradient of E[kl_loss] over one token from `old`, by enumeration; None: the policy itself."""

    def of(policy):
        sampler = policy.detach() if old is None else old
        mask = torch.ones(3, 1).bool()
        columns = (x[:, None] for x in (policy, sampler, REF))
        return (sampler.exp() * kl_loss(*columns, mask, estimator)[:, 0]).sum()

    return gradient(of)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("k2", lambda policy: kl(policy, REF)),
        ("k3", lambda policy: kl(REF, policy)),
        ("k1_to_go", lambda policy: kl(policy, REF)),
        ("k2_straight_through", lambda policy: kl(policy, REF)),
        ("k3_ratio", lambda policy: kl(policy, REF)),
    ],
)
def test_expected_gradient_of_on_policy_loss(estimator, target):
    torch.testing.assert_close(expected(estimator, None), gradient(target), rtol=1e-12, atol=1e-15)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@each_loss
def test_only_ratio_losses_are_exact_off_policy(estimator):
    wanted = gradient(lambda policy: kl(policy, REF))
    if estimator in ("k1_to_go", "k3_ratio"):
        torch.testing.assert_close(expected(estimator, OLD), wanted, rtol=1e-12, atol=1e-15)
    else:
        assert (expected(estimator, OLD) - wanted).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("rho", "u", "estimator", "value", "slope"),
    [
        (1.0, math.log(2), "k2", math.log(2) ** 2 / 2, math.log(2)),
        (1.0, math.log(2), "k3", math.log(2) - 1 / 2, 1 / 2),  # 1 - e^-u
        (1.0, math.log(2), "k2_straight_through", math.log(2) - 1 / 2, math.log(2)),
        (1.0, math.log(2), "k3_ratio", math.log(2) - 1 / 2, math.log(2)),  # k3 + (1 - e^-u) = u
        (1.0, math.log(2), "k1_to_go", math.log(2), math.log(2)),
        (2.0, -math.log(2), "k2", math.log(2) ** 2 / 2, -math.log(2)),
        (2.0, -math.log(2), "k3", 1 - math.log(2), -1),
        (2.0, -math.log(2), "k2_straight_through", 1 - math.log(2), -math.log(2)),
        (2.0, -math.log(2), "k3_ratio", 2 - 2 * math.log(2), -2 * math.log(2)),
        (2.0, -math.log(2), "k1_to_go", -math.log(2), -2 * math.log(2)),
    ],
)
def test_single_token_loss_by_hand(rho, u, estimator, value, slope):
    logprob = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    old, ref = logprob.detach() - math.log(rho), logprob.detach() - u
    per_token = kl_loss(logprob, old, ref, torch.ones(1, 1).bool(), estimator)
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(value, abs=1e-12)
    assert logprob.grad.item() == pytest.approx(slope, abs=1e-12)


# -------------------------------------------------------------------- as a loss: whole completions


def prefix_kl(logits, ref):
    """(3,) KL of the next token at each prefix."""
    p, q = logits.log_softmax(1), ref.log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def table_gradient(of, logits):
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(of(logits), logits)[0]


def completion_gradient(estimator, logits, old, ref):
    """Of E[sum_t kl_loss_t] over all completions, each as likely as `old` makes it."""
    old_logprobs = tabular.log_probs(old)
    likely = old_logprobs.nan_to_num(0.0).sum(1, keepdim=True).exp()

    def of(x):
        args = (tabular.log_probs(x), old_logprobs, tabular.log_probs(ref), tabular.MASK, estimator)
        return (likely * kl_loss(*args)).sum()

    return table_gradient(of, logits)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize("seed", range(3))
def test_k1_to_go_is_gradient_of_sequence_kl(seed):
    logits, ref = tabular.logits(seed), tabular.logits(seed + 10)

    def whole_kl(x):
        log, other = (torch.where(tabular.MASK, tabular.log_probs(y), 0.0).sum(1) for y in (x, ref))
        return (log.exp() * (log - other)).sum()

    actual = completion_gradient("k1_to_go", logits, logits, ref)
    torch.testing.assert_close(actual, table_gradient(whole_kl, logits), rtol=1e-10, atol=1e-12)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k2", "k2_straight_through", "k3_ratio"])
def test_token_level_losses_hold_prefixes_fixed(estimator, seed):
    logits, ref = tabular.logits(seed), tabular.logits(seed + 10)
    actual = completion_gradient(estimator, logits, logits, ref)
    held = table_gradient(lambda x: (tabular.visits(logits) * prefix_kl(x, ref)).sum(), logits)
    torch.testing.assert_close(actual, held, rtol=1e-12, atol=1e-15)
    # what they leave out: the first token decides which prefixes, and so which KL, come after it
    left_out = table_gradient(lambda x: (tabular.visits(x) * prefix_kl(logits, ref)).sum(), logits)
    exact = completion_gradient("k1_to_go", logits, logits, ref)
    torch.testing.assert_close(actual + left_out, exact, rtol=1e-12, atol=1e-14)
    assert torch.cosine_similarity(actual.flatten(), exact.flatten(), dim=0) < 0.99


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize("seed", range(3))
def test_off_policy_k3_ratio_is_exact_at_old_prefixes(seed):
    logits, ref, old = tabular.logits(seed), tabular.logits(seed + 10), tabular.logits(seed + 20)
    actual = completion_gradient("k3_ratio", logits, old, ref)
    held = table_gradient(lambda x: (tabular.visits(old) * prefix_kl(x, ref)).sum(), logits)
    torch.testing.assert_close(actual, held, rtol=1e-12, atol=1e-14)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize("seed", range(3))
def test_off_policy_k1_to_go_uses_old_policy_completions(seed):
    logits, ref, old = tabular.logits(seed), tabular.logits(seed + 10), tabular.logits(seed + 20)
    u = (logits.log_softmax(1) - ref.log_softmax(1)).tolist()
    pi_old = old.softmax(1).tolist()

    def of(x):
        first, total = x.log_softmax(1).exp()[0], 0.0
        for a in range(3):
            after = sum(pi_old[a][b] * u[a][b] for b in range(3)) if a else 0.0
            total = total + first[a] * (u[0][a] + after)
        for a in (1, 2):
            second = x.log_softmax(1).exp()[a]
            total = total + pi_old[0][a] * sum(second[b] * u[a][b] for b in range(3))
        return total

    actual = completion_gradient("k1_to_go", logits, old, ref)
    torch.testing.assert_close(actual, table_gradient(of, logits), rtol=1e-12, atol=1e-14)
    exact = completion_gradient("k1_to_go", logits, logits, ref)
    assert (actual - exact).norm() > 0.01 * exact.norm()


# ----------------------------------------------------------------------- as a loss: every number


def looped(logprobs, old, ref, mask, estimator):
    """Values and gradients (B,T), token by token from the table."""
    values, slopes = torch.zeros(mask.shape).double(), torch.zeros(mask.shape).double()
    for i, t in mask.nonzero().tolist():
        u = (logprobs[i, t] - ref[i, t]).item()
        rho = math.exp(logprobs[i, t] - old[i, t])
        k3 = math.exp(-u) - 1 + u
        later = [j for j in range(t, mask.shape[1]) if mask[i, j]]
        to_go = sum((logprobs[i, j] - ref[i, j]).item() for j in later)
        values[i, t], slopes[i, t] = {
            "k2": (u**2 / 2, u),
            "k3": (k3, 1 - math.exp(-u)),
            "k2_straight_through": (k3, u),
            "k3_ratio": (rho * k3, rho * k3 + rho * (1 - math.exp(-u))),  # the product rule
            "k1_to_go": (u, rho * to_go),
        }[estimator]
    return values, slopes


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@each_loss
@few
@given(case=tokens())
def test_losses_and_gradients_match_loop_over_unmasked_slots(estimator, case):
    mask, logprobs, old, ref = case
    values, slopes = looped(logprobs, old, ref, mask, estimator)
    logprobs.requires_grad_()
    per_token = kl_loss(logprobs, old, ref, mask, estimator)
    per_token.sum().backward()
    torch.testing.assert_close(per_token.detach(), values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs.grad, slopes, rtol=1e-12, atol=1e-12)


def numbers(seed, shape=(3, 4)):
    return -2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


def test_sum_to_go_skips_tool_tokens():
    logprobs = torch.tensor([[-1.0, NAN, -2.0, -0.5, NAN]], requires_grad=True)
    ref = torch.tensor([[-1.5, NAN, -1.0, -2.5, NAN]])  # u = 0.5, -1, 2
    mask = torch.tensor([[True, False, True, True, False]])
    per_token = kl_loss(logprobs, logprobs.detach(), ref, mask, "k1_to_go")
    per_token.sum().backward()
    assert per_token.tolist() == [[0.5, 0, -1, 2, 0]]
    assert logprobs.grad.tolist() == [[1.5, 0, 1, 2, 0]]


@pytest.mark.parametrize("u", [12.0, -12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_loss
def test_gradient_far_from_reference_still_pulls_back(estimator, dtype, u):
    # where others clamp k3 at 10 it is 0
    logprob = torch.full((1, 1), u, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1).bool()
    kl_loss(logprob, logprob.detach(), torch.zeros_like(logprob), mask, estimator).sum().backward()
    slope = 1 - math.exp(-u) if estimator == "k3" else u
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k2", 5000, -100),
        ("k3", math.inf, -math.inf),
        ("k2_straight_through", math.inf, -100),
        ("k3_ratio", math.inf, -100),
        ("k1_to_go", -100, -100),
    ],
)
def test_k3_overflow_shows_in_value_only(estimator, value, slope):
    logprob = torch.full((1, 1), -100.0, requires_grad=True)  # float32: exp(100) is inf
    mask = torch.ones(1, 1).bool()
    per_token = kl_loss(logprob, logprob.detach(), torch.zeros(1, 1), mask, estimator)
    per_token.sum().backward()
    assert per_token.item() == value
    assert logprob.grad.item() == slope


@pytest.mark.parametrize("log_rho", [50.0, -50.0])
@pytest.mark.parametrize("estimator", ["k1_to_go", "k3_ratio"])
def test_extreme_ratio_is_clamped_and_keeps_gradient(estimator, log_rho):
    logprob = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    old, ref = logprob.detach() - log_rho, logprob.detach() - 0.75
    kl_loss(logprob, old, ref, torch.ones(1, 1).bool(), estimator).sum().backward()
    held = math.exp(math.copysign(20, log_rho))
    assert logprob.grad.item() == pytest.approx(held * 0.75, rel=1e-12)


@each_loss
def test_only_policy_gets_gradient(estimator):
    logprobs, old, ref = (numbers(i).requires_grad_() for i in range(3))
    kl_loss(logprobs, old, ref, torch.ones(3, 4).bool(), estimator).sum().backward()
    assert (logprobs.grad != 0).any()
    assert old.grad is None
    assert ref.grad is None


def test_sum_to_go_of_long_bf16_row_keeps_precision():
    # 2048 tokens of u = 1; bfloat16 counts no further than 256
    logprobs = torch.ones(1, 2048, dtype=torch.bfloat16, requires_grad=True)
    mask, zeros = torch.ones(1, 2048).bool(), torch.zeros(1, 2048, dtype=torch.bfloat16)
    kl_loss(logprobs, logprobs.detach(), zeros, mask, "k1_to_go").sum().backward()
    assert logprobs.grad[0, 0].item() == 2048


@pytest.mark.parametrize(
    ("estimator", "message"),
    [("k1", "its expected gradient is 0: use .k1_to_go."), ("k4", ", ".join(KL_LOSSES))],
)
def test_unusable_loss_estimator_raises(estimator, message):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        kl_loss(x, x, x, torch.ones(1, 1).bool(), estimator)


# -------------------------------------------------------- divergences over the vocabulary


def _by_hand(p: list[float], q: list[float], kind: str, w: float) -> float:
    """A divergence, term by term."""
    if kind == "js":
        m = [w * b + (1 - w) * a for a, b in zip(p, q, strict=True)]
        return w * _by_hand(q, m, "reverse_kl", w) + (1 - w) * _by_hand(p, m, "reverse_kl", w)
    if kind == "forward_kl":
        p, q = q, p
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.proves("rlhf_pg.kl.divergence")
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, 2, 5, 9])
def test_divergence_and_gradient_by_hand(kind: str, top_k: int | None) -> None:
    """The gradient by differences; with top_k the other tokens are one."""
    z = torch.tensor([0.5, -1.0, 2.0, 0.1, -0.3], dtype=torch.float64)
    q = torch.tensor([0.4, 0.05, 0.1, 0.3, 0.15], dtype=torch.float64)
    named = q.argsort(descending=True)[:top_k].tolist()

    def seen(probabilities: list[float]) -> list[float]:
        own = [probabilities[v] for v in named]
        return own if len(own) == 5 else [*own, 1 - sum(own)]

    def value(z: torch.Tensor) -> float:
        return _by_hand(seen(z.softmax(-1).tolist()), seen(q.tolist()), kind, 0.3)

    found, slope = divergence(z.log_softmax(-1)[None], q.log()[None], kind, 0.3, top_k)
    assert found.item() == pytest.approx(value(z), rel=1e-12)
    step = 1e-6 * torch.eye(5, dtype=torch.float64)
    slopes = [(value(z + e) - value(z - e)) / 2e-6 for e in step]
    assert slope[0].tolist() == pytest.approx(slopes, abs=1e-8)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, 1])
def test_divergence_is_finite_for_impossible_tokens(kind: str, top_k: int | None) -> None:
    p, q = torch.tensor([[0.0, -1e4, -1e4]]), torch.tensor([[-1e4, 0.0, -1e4]])
    for pair in ((p, q), (p, p)):
        found, slope = divergence(*pair, kind, 0.5, top_k)
        assert found.isfinite().all()
        assert slope.isfinite().all()


def test_unknown_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match="backward_kl"):
        divergence(LOGITS, LOGITS, "backward_kl")
