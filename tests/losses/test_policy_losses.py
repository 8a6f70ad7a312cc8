"""Each policy loss against its formula in plain Python, its gradient on both sides of a kink."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from rlhf_pg.losses import (
    SAMPLER_CORRECTIONS,
    SQUARE,
    against_sampler,
    cispo,
    clipped_surrogate,
    dppo,
    kl_penalty,
    sampler_weights,
    sapo,
    surrogate,
    token_weights,
)
from tests.numbers import equal, f64, few, quarters

NAN = float("nan")


# ------------------------------------------------------------------------------------ formulas
# Of one completion: (log pi, log pi_old, A, log pi where the gradient stops) -> loss of its tokens.


def clip(x, low, high):
    return min(max(x, low), high)


def ratios(logprobs, old):
    return [
        math.exp(clip(new - before, -20, 20)) for new, before in zip(logprobs, old, strict=True)
    ]


def per_token(loss_of):
    """From loss_of(rho, A, log pi, rho where the gradient stops)."""

    def of_row(logprobs, old, advantage, stopped):
        rows = zip(ratios(logprobs, old), logprobs, ratios(stopped, old), strict=True)
        return [loss_of(rho, advantage, logprob, still) for rho, logprob, still in rows]

    return of_row


def dual_clip(rho, a, *_):
    clipped = min(rho * a, clip(rho, 0.8, 1.2) * a)
    return -max(clipped, 2.5 * a) if a < 0 else -clipped


def soft_gate(rho, a, *_):
    tau = 1.5 if a > 0 else 2.5
    return -a * 4 / tau / (1 + math.exp(-tau * (rho - 1)))


def gspo(logprobs, old, a, _):
    mean = sum(new - before for new, before in zip(logprobs, old, strict=True)) / len(logprobs)
    s = math.exp(mean)
    return [-min(s * a, clip(s, 0.8, 1.3) * a)] * len(logprobs)


def probability_mask(rho, a, logprob, still):
    old = math.exp(logprob) / rho
    rise = (still - 1) * old
    return 0.0 if (a > 0 and rise > 0.3) or (a < 0 and rise < -0.2) else -rho * a


FORMULAS = {
    "surrogate": (surrogate, per_token(lambda rho, a, *_: -rho * a)),
    "kl_penalty": (
        lambda *x: kl_penalty(*x, old_kl_coef=0.7),
        per_token(lambda rho, a, *_: -rho * a + 0.7 * (rho - 1 - math.log(rho))),
    ),
    "clipped_surrogate": (
        lambda *x: clipped_surrogate(*x, epsilon=0.2, epsilon_high=0.3),
        per_token(lambda rho, a, *_: -min(rho * a, clip(rho, 0.8, 1.3) * a)),
    ),
    "dual_clip": (lambda *x: clipped_surrogate(*x, delta=2.5), per_token(dual_clip)),
    "gspo": (
        lambda *x: clipped_surrogate(*x, 0.2, 0.3, importance_sampling_level="sequence"),
        gspo,
    ),
    "cispo": (
        lambda *x: cispo(*x, epsilon=0.2, epsilon_high=0.5),
        per_token(lambda rho, a, logprob, still: -clip(still, 0.8, 1.5) * a * logprob),
    ),
    "sapo": (
        lambda *x: sapo(*x, sapo_temperature_pos=1.5, sapo_temperature_neg=2.5),
        per_token(soft_gate),
    ),
    "dppo": (lambda *x: dppo(*x, epsilon=0.2, epsilon_high=0.3), per_token(probability_mask)),
}
each_formula = pytest.mark.parametrize(("loss", "formula"), FORMULAS.values(), ids=FORMULAS)
proves_all = pytest.mark.proves(
    *(f"rlhf_pg.losses.{name}" for name in FORMULAS if name not in ("dual_clip", "gspo"))
)


def by_formula(formula, logprobs, old, advantages, mask, stopped=None):
    """(B,T), one row at a time; `advantages` (B,1)."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(mask):
        if row.any():
            sides = (logprobs, old, logprobs if stopped is None else stopped)
            new, before, still = (x[i, row].tolist() for x in sides)
            out[i, row] = f64(formula(new, before, advantages[i].item(), still))
    return out


def by_differences(value, logprobs, step=1e-6):
    """The gradient of `value` by its central differences, (B,T)."""
    out = torch.zeros_like(logprobs)
    for slot in np.ndindex(*logprobs.shape):
        sides = []
        for sign in (1, -1):
            moved = logprobs.clone()
            moved[slot] += sign * step
            sides.append(value(moved).item())
        out[slot] = (sides[0] - sides[1]) / (2 * step)
    return out


def gradient(loss, logprobs, *others):
    logprobs = logprobs.clone().requires_grad_()
    loss(logprobs, *others)[0].sum().backward()
    return logprobs.grad


@st.composite
def completions(draw):
    """log pi, log pi_old (B,T) with NaN where masked, advantages (B,1), mask with holes (B,T)."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    mask = draw(arrays(np.bool_, shape))
    new, old = (draw(arrays(float, shape, elements=quarters())) for _ in range(2))
    advantages = draw(arrays(float, (shape[0], 1), elements=quarters()))
    hidden = (torch.tensor(np.where(mask, x, np.nan)) for x in (new, old))
    return *hidden, torch.tensor(advantages), torch.tensor(mask)


@proves_all
@each_formula
@few
@given(case=completions())
def test_loss_matches_formula(loss, formula, case):
    equal(loss(*case)[0], by_formula(formula, *case))


@proves_all
@each_formula
def test_loss_gradient_matches_formula(loss, formula):
    noise = torch.Generator().manual_seed(0)
    logprobs, old = torch.randn(2, 6, 5, generator=noise, dtype=torch.float64) / 2
    advantages = torch.randn(6, 1, generator=noise, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=noise) < 0.8

    def value(moved):
        return by_formula(formula, moved, old, advantages, mask, stopped=logprobs).sum()

    grad = gradient(loss, logprobs, old, advantages, mask)
    equal(grad, by_differences(value, logprobs), 1e-7)
    assert (grad[mask] != 0).any()


KINKS = [
    # where log rho has its kink, A, and the slopes by log pi on its two sides, as functions of rho
    ("clipped_surrogate", math.log(1.3), 1.0, lambda rho: -rho, lambda rho: 0),
    ("clipped_surrogate", math.log(0.8), -1.0, lambda rho: 0, lambda rho: rho),
    ("clipped_surrogate", math.log(1.3), -1.0, lambda rho: rho, lambda rho: rho),
    ("clipped_surrogate", math.log(0.8), 1.0, lambda rho: -rho, lambda rho: -rho),
    ("dual_clip", math.log(2.5), -1.0, lambda rho: rho, lambda rho: 0),
    ("dual_clip", math.log(2.5), 1.0, lambda rho: 0, lambda rho: 0),
    ("dual_clip", math.log(0.8), -1.0, lambda rho: 0, lambda rho: rho),
    ("gspo", math.log(1.3), 1.0, lambda rho: -rho, lambda rho: 0),
    ("gspo", math.log(0.8), -1.0, lambda rho: 0, lambda rho: rho),
    ("cispo", math.log(1.5), 1.0, lambda rho: -rho, lambda rho: -1.5),
    ("cispo", math.log(0.8), 1.0, lambda rho: -0.8, lambda rho: -rho),
    ("cispo", math.log(1.5), -1.0, lambda rho: rho, lambda rho: 1.5),
    # pi_old = 1/4, so probabilities of 0.55 and 0.05
    ("dppo", math.log(2.2), 1.0, lambda rho: -rho, lambda rho: 0),
    ("dppo", math.log(0.2), -1.0, lambda rho: 0, lambda rho: rho),
    ("dppo", math.log(2.2), -1.0, lambda rho: rho, lambda rho: rho),
    ("dppo", math.log(0.2), 1.0, lambda rho: -rho, lambda rho: -rho),
    ("surrogate", 20.0, 1.0, lambda rho: -rho, lambda rho: 0),
    ("kl_penalty", 0.0, 0.0, lambda rho: 0.7 * (rho - 1), lambda rho: 0.7 * (rho - 1)),
]


@proves_all
@pytest.mark.parametrize(("name", "kink", "advantage", "below", "above"), KINKS)
@pytest.mark.parametrize("side", [-1e-3, 1e-3])
def test_loss_and_gradient_match_formula_around_kinks(name, kink, advantage, below, above, side):
    loss, formula = FORMULAS[name]
    old, mask = f64([[math.log(0.25)]]), torch.ones(1, 1).bool()
    logprobs, rest = old + kink + side, (old, f64([[advantage]]), mask)

    def value(moved):
        return by_formula(formula, moved, *rest, stopped=logprobs).sum()

    slope = (below if side < 0 else above)(math.exp(kink + side))
    assert gradient(loss, logprobs, *rest).item() == pytest.approx(slope, rel=1e-12, abs=1e-12)
    difference = by_differences(value, logprobs, 1e-5).item()
    assert difference == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_sapo_temperatures_keep_ratio_dtype():
    # -4 / tau sigmoid(tau (rho - 1)) A; in float32 a tau of 1.05 or 1.3 is off by 5e-8
    old, mask = torch.zeros(1, 2).double(), torch.ones(1, 2).bool()
    per_token, _ = sapo(f64([[3.0, 3.0]]).log(), old, f64([[2.0, -2.0]]), mask, 1.3, 1.05)
    expected = [-8 / 1.3 / (1 + math.exp(-2.6)), 8 / 1.05 / (1 + math.exp(-2.1))]
    equal(per_token, f64([expected]), 1e-12)


# ------------------------------------------------------------------- one ratio for a whole row


def test_gspo_by_hand():
    # s = exp((.3 - .1) / 2) = e^.1, inside; the slope of the mean of two tokens is s A / 2 each
    logprobs, old = f64([[-0.7, NAN, -1.1]]), f64([[-1.0, NAN, -1.0]])
    mask = torch.tensor([[True, False, True]])

    def mean_loss(*x):
        per_token, metrics = clipped_surrogate(*x, importance_sampling_level="sequence")
        return per_token * token_weights(x[3], "sequence_mean", dtype=torch.float64), metrics

    case = (logprobs, old, f64([[2.0]]), mask)
    weighted, metrics = mean_loss(*case)
    assert weighted.sum().item() == pytest.approx(-2 * math.exp(0.1))
    equal(gradient(mean_loss, *case), f64([[-math.exp(0.1), 0, -math.exp(0.1)]]))
    equal(metrics["ratio"], f64([[math.exp(0.1), 0, math.exp(0.1)]]))


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.7, 1, 0), (1.1, 0, 0), (1.3, 0, 1)])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_cispo_counts_clipped_weights_for_either_sign(ratio, low, high, advantage):
    old, mask = f64([[-1.0]]), torch.ones(1, 1).bool()
    _, metrics = cispo(old + math.log(ratio), old, f64([[advantage]]), mask)
    clips = [metrics[f"clip_ratio/{name}_mean"].item() for name in ("low", "high", "region")]
    assert clips == [low, high, low + high]


def test_delta_metric_counts_tokens_capped_at_delta():
    old, mask = torch.zeros(1, 4).double(), torch.ones(1, 4).bool()
    case = (f64([[3.5, 2.9, 3.5, 0.5]]).log(), old, f64([[-1, -1, 1, -1]]), mask)
    per_token, metrics = clipped_surrogate(*case, delta=3.0)
    equal(per_token, f64([[3, 2.9, -1.2, 0.8]]))
    assert metrics["clip_ratio/delta_mean"].tolist() == [[1, 0, 0, 0]]
    assert metrics["clip_ratio/region_mean"].tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("delta", [1.0, 0.5])
def test_delta_not_above_one_raises(delta):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="delta must be above 1"):
        clipped_surrogate(x, x, x, torch.ones(1, 1).bool(), delta=delta)


def test_unknown_importance_sampling_level_raises():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="importance_sampling_level"):
        clipped_surrogate(x, x, x, torch.ones(1, 1).bool(), importance_sampling_level="row")


# ------------------------------------------------------------------------------ sampler_weights


def weights_by_loop(old, sampler, mask, mode, high, low):
    level, bound = mode.split("_")
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        tokens = mask[i].nonzero()[:, 0].tolist() if level == "sequence" else [t]
        w = math.prod(math.exp(old[i, k] - sampler[i, k]) for k in tokens)
        inside = low <= w <= high
        out[i, t] = clip(w, low, high) if bound == "truncate" else w * inside
    return out


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
@pytest.mark.parametrize("mode", SAMPLER_CORRECTIONS)
@few
@given(case=completions(), high=st.sampled_from([1.4, 3.0]), low=st.sampled_from([None, 0.6]))
def test_sampler_weights_match_loop(mode, case, high, low):
    old, sampler, _, mask = case
    weights = sampler_weights(old, sampler, mask, mode, high, low)
    equal(weights, weights_by_loop(old, sampler, mask, mode, high, low or 0))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # w_t = 2, 4, 1/8; their product is 1
        ("token_truncate", [2, 3, 1 / 8]),
        ("token_mask", [2, 0, 1 / 8]),
        ("sequence_truncate", [1, 1, 1]),
        ("sequence_mask", [1, 1, 1]),
    ],
)
def test_sampler_weights_by_hand(mode, expected):
    old = f64([[2.0, 4.0, 1 / 8, NAN]]).log()
    mask = torch.tensor([[True, True, True, False]])
    weights = sampler_weights(old.requires_grad_(), torch.zeros(1, 4).double(), mask, mode)
    equal(weights, f64([[*expected, 0]]))
    assert not weights.requires_grad


@pytest.mark.parametrize("mode", SAMPLER_CORRECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_huge_mismatch_stays_finite(mode, dtype):
    old = torch.tensor([[100.0, 100.0], [-100.0, 0.0]], dtype=dtype)
    weights = sampler_weights(old, torch.zeros_like(old), torch.ones(2, 2).bool(), mode)
    assert weights.isfinite().all()
    assert weights.dtype == dtype
    wide = sampler_weights(old, torch.zeros_like(old), torch.ones(2, 2).bool(), mode, float("inf"))
    assert wide[0, 0].log().item() == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize(
    ("mode", "weights", "logged"),
    [("none", None, [5.0, 1.0]), ("token_truncate", [3.0, 1.0], [3.0, 1.0])],
)
def test_numbers_against_sampler_by_hand(mode, weights, logged):
    """Without a correction the plain ratios are logged, however large."""
    old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.1, 0.9]]).log()
    own, numbers = against_sampler(old, sampler, torch.ones(1, 2).bool(), mode)
    assert (own if own is None else own[0].tolist()) == pytest.approx(weights)
    ratio, difference = "importance_sampling_ratio", "sampling_logp_difference"
    assert numbers.keys() == {
        *(f"sampling/{ratio}/{x}" for x in ("min", "mean", "max")),
        *(f"sampling/{difference}/{x}" for x in ("mean", "max")),
        *(SQUARE, "sampling/clipped_share"),
    }
    assert numbers.pop("sampling/clipped_share")[0].tolist() == [mode != "none", 0]
    for name, values in numbers.items():
        expected = [x * x for x in logged] if name == SQUARE else logged
        expected = expected if ratio in name else [math.log(5), 0]
        assert values[0].tolist() == pytest.approx(expected, abs=1e-6)
