"""Per-token losses, their gradients, and the weights that add them up."""

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from rlhf_pg.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    clipped_surrogate,
    high_entropy,
    nll,
    token_weights,
    value_loss,
    vanilla,
    weight_count,
)
from tests.numbers import equal, f64, few, quarters, tokens

NAN = float("nan")


# Each as a function of log pi, log pi_old, advantages and mask.
POLICY = {name: loss for name, loss in POLICY_LOSSES.items() if name != "none"} | {
    "clipped-higher": lambda *x: clipped_surrogate(*x, epsilon=0.1, epsilon_high=0.4),
    "dual-clip": lambda *x: clipped_surrogate(*x, delta=2.0),
    "gspo": lambda *x: clipped_surrogate(*x, importance_sampling_level="sequence"),
}
WITH_RATIO = {name: loss for name, loss in POLICY.items() if name != "vanilla"}
# Their advantage is the row's, so their gradient at a token is not that token's alone.
OF_ROWS = ("gspo",)
# Each as a function of what it is differentiated by and two other (B,T) inputs.
LOSSES = POLICY | {"value": value_loss, "value-clipped": lambda *x: value_loss(*x, clip_range=0.3)}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def gradient(loss, x, *others, mask):
    x = x.clone().requires_grad_()
    loss(x, *others, mask)[0].sum().backward()
    return x.grad


def surrogate_of_one(ratio, advantage, **options):
    """Loss, gradient by the log-probability, and metrics of one token; pi_old = 1/4."""
    old = f64([[math.log(0.25)]])
    logprob = (old + math.log(ratio)).requires_grad_()
    mask = torch.ones(1, 1).bool()
    per_token, metrics = clipped_surrogate(logprob, old, f64([[advantage]]), mask, **options)
    per_token.sum().backward()
    return per_token.item(), logprob.grad.item(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.proves("rlhf_pg.losses.vanilla")
def test_vanilla_by_hand():
    logprobs = f64([[-1.0, -2.0, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    per_token, metrics = vanilla(logprobs, torch.full((1, 3), NAN), f64([[3, -0.5, NAN]]), mask)
    assert per_token.tolist() == [[3, -1, 0]]  # -(3 * -1), -(-.5 * -2)
    per_token.sum().backward()
    assert logprobs.grad.tolist() == [[-3, 0.5, 0]]
    assert metrics == {}


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # -min(rho A, clip(rho, .8, 1.2) A); d rho / d log pi = rho
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 1.0, -1.2, 0.0),  # clipped above
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (1.5, -1.0, 1.5, 1.5),  # outside, but pulled back: the minimum keeps the gradient
        (0.5, 1.0, -0.5, -0.5),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope):
    value, grad, metrics = surrogate_of_one(ratio, advantage)
    assert value == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(slope, abs=1e-12)
    assert metrics["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(1.5, 1.0, -1.5, -1.5), (2.0, 1.0, -1.6, 0.0), (0.8, -1.0, 0.9, 0.0), (0.95, -1, 0.95, 0.95)],
)
def test_upper_clip_distance_is_separate(ratio, advantage, loss, slope):
    value, grad, _ = surrogate_of_one(ratio, advantage, epsilon=0.1, epsilon_high=0.6)
    assert value == pytest.approx(loss, abs=1e-12)
    assert grad == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (1.5, 1.0, 0, 1),
        (0.5, -1.0, 1, 0),
        (1.5, -1.0, 0, 0),  # outside the interval, yet not cut off
        (0.5, 1.0, 0, 0),
        (1.5, 0.0, 0, 0),
        (0.5, 0.0, 0, 0),
        (1.1, 1.0, 0, 0),
    ],
)
def test_clip_metrics_count_clipped_tokens(ratio, advantage, low, high):
    _, _, metrics = surrogate_of_one(ratio, advantage)
    assert metrics["clip_ratio/low_mean"] == low
    assert metrics["clip_ratio/high_mean"] == high
    assert metrics["clip_ratio/region_mean"] == low + high
    assert metrics["ratio_overflow"] == 0


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
@few
@given(case=tokens(), low=st.sampled_from([0.1, 0.2]), high=st.sampled_from([None, 0.1, 0.5]))
def test_clipped_surrogate_matches_loop(case, low, high):
    mask, logprobs, old, advantages = case
    expected = torch.zeros(mask.shape).double()
    for i, t in mask.nonzero().tolist():
        rho, a = math.exp(logprobs[i, t] - old[i, t]), advantages[i, t].item()
        clipped = min(max(rho, 1 - low), 1 + (low if high is None else high))
        expected[i, t] = -min(rho * a, clipped * a)
    equal(clipped_surrogate(logprobs, old, advantages, mask, low, high)[0], expected)


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
@few
@given(case=tokens())
def test_only_clipped_tokens_have_zero_gradient(case):
    mask, logprobs, old, advantages = case
    grad = gradient(clipped_surrogate, logprobs, old, advantages, mask=mask)
    cut = clipped_surrogate(logprobs, old, advantages, mask)[1]["clip_ratio/region_mean"] == 1
    ratio = (logprobs - old).exp()
    up, down = (ratio > 1.2) & (advantages > 0), (ratio < 0.8) & (advantages < 0)
    assert torch.equal(cut, (up | down) & mask)
    assert (grad[cut] == 0).all()
    kept = mask & ~cut
    equal(grad[kept], (-ratio * advantages)[kept])


@pytest.mark.parametrize("name", POLICY)
@few
@given(case=tokens(2), shares=arrays(float, 4, elements=quarters()))
def test_row_advantage_is_broadcast_to_tokens(name, case, shares):
    mask, logprobs, old = case
    advantages = torch.tensor(shares[: len(mask), None])
    loss = POLICY[name]
    narrow = loss(logprobs, old, advantages, mask)
    wide = loss(logprobs, old, advantages.expand(mask.shape), mask)
    equal(narrow[0], wide[0])
    for metric in narrow[1]:
        equal(narrow[1][metric], wide[1][metric])


@pytest.mark.proves(*(f"rlhf_pg.losses.{name}" for name in POLICY_LOSSES))
@pytest.mark.parametrize("name", sorted(POLICY))
@few
@given(case=tokens(2))
def test_loss_gradient_at_ratio_one_is_reinforce(name, case):
    mask, logprobs, advantages = case
    if name in OF_ROWS:
        advantages = advantages.nan_to_num(nan=0.5)[:, :1]
    grad = gradient(POLICY[name], logprobs, logprobs, advantages, mask=mask)
    equal(grad, torch.where(mask, -advantages, 0.0))


@pytest.mark.parametrize("loss", WITH_RATIO.values(), ids=WITH_RATIO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_ratio_stays_finite_and_is_counted(loss, log_ratio, sign, dtype):
    logprobs = torch.tensor([[log_ratio, log_ratio], [0.0, 0.0]], dtype=dtype)
    others = torch.zeros(2, 2, dtype=dtype), torch.tensor([[sign], [-2 * sign]], dtype=dtype)
    mask = torch.ones(2, 2).bool()
    per_token, metrics = loss(logprobs, *others, mask)
    assert per_token.isfinite().all()
    assert metrics["ratio_overflow"].tolist() == [[1, 1], [0, 0]]
    held_at = math.copysign(20, log_ratio)
    held = torch.tensor([[held_at, held_at], [0, 0]], dtype=dtype)
    torch.testing.assert_close(metrics["ratio"].log(), held)
    assert all(metric.isfinite().all() for metric in metrics.values())
    assert gradient(loss, logprobs, *others, mask=mask).isfinite().all()


def test_approx_kl_is_masked_mean():
    # Two tokens of eight with log rho = .2: e^.2 - 1 - .2, close to .2^2 / 2, not a quarter of it
    logprobs = f64([[-0.8, -0.8] + [NAN] * 6])
    mask = torch.arange(8)[None] < 2
    _, metrics = clipped_surrogate(logprobs, torch.full((1, 8), -1.0).double(), f64([[1]]), mask)
    mean = (metrics["approx_kl"] * token_weights(mask, "token_mean", dtype=torch.float64)).sum()
    assert mean.item() == pytest.approx(math.exp(0.2) - 1.2)
    assert mean.item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.proves("rlhf_pg.losses.value_loss")
@pytest.mark.parametrize(
    ("value", "old", "target", "clip_range", "loss", "slope", "clipped"),
    [
        (-1.0, 0.0, 3.0, None, 8.0, -4.0, None),  # 16 / 2
        # V_c = -.2: max(16, 10.24) / 2; V_c alone would give 5.12 without a gradient, stuck
        (-1.0, 0.0, 3.0, 0.2, 8.0, -4.0, 0),
        # V_c = .2: max(4, 7.84) / 2, no gradient: V has moved far enough for one update
        (1.0, 0.0, 3.0, 0.2, 3.92, 0.0, 1),
        (0.5, 0.4, 3.0, 0.2, 3.125, -2.5, 0),  # inside the range: V_c = V, 6.25 / 2
        (2.0, 5.0, 2.0, 1.0, 2.0, 0.0, 1),  # V = R, but V_c = 4
    ],
)
def test_value_loss_by_hand(value, old, target, clip_range, loss, slope, clipped):
    values = f64([[value]]).requires_grad_()
    mask = torch.ones(1, 1).bool()
    per_token, metrics = value_loss(values, f64([[old]]), f64([[target]]), mask, clip_range)
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert (metrics["value_clip_ratio"].item() if metrics else None) == clipped


@pytest.mark.proves("rlhf_pg.losses.value_loss")
@few
@given(case=tokens(), clip_range=st.sampled_from([None, 0.3, 1.1]))
def test_value_loss_matches_loop(case, clip_range):
    mask, values, old, returns = case
    expected = torch.zeros(mask.shape).double()
    for i, t in mask.nonzero().tolist():
        v, v_old, r = (x[i, t].item() for x in (values, old, returns))
        squares = [(v - r) ** 2]
        if clip_range is not None:
            squares.append((v_old + min(max(v - v_old, -clip_range), clip_range) - r) ** 2)
        expected[i, t] = max(squares) / 2
    equal(value_loss(values, old, returns, mask, clip_range)[0], expected)


@each_loss
@few
@given(case=tokens())
def test_masked_values_are_ignored(loss, case):
    mask, *numbers = case
    filled = [x.nan_to_num(nan=0.7) for x in numbers]
    per_token, metrics = loss(*numbers, mask)
    assert (per_token[~mask] == 0).all()
    equal(per_token, loss(*filled, mask)[0])
    grad = gradient(loss, *numbers, mask=mask)
    assert (grad[~mask] == 0).all()
    assert grad.isfinite().all()
    equal(grad, gradient(loss, *filled, mask=mask))
    for metric in metrics.values():
        assert metric.shape == mask.shape
        assert (metric[~mask] == 0).all()


@each_loss
def test_only_first_input_gets_gradient(loss):
    inputs = [torch.full((2, 3), v, dtype=torch.float64) for v in (0.3, 0.2, 1)]
    inputs[2][1] = -0.5
    inputs = [x.requires_grad_() for x in inputs]
    per_token, metrics = loss(*inputs, torch.ones(2, 3).bool())
    per_token.sum().backward()
    assert inputs[0].grad.abs().sum() > 0
    assert inputs[1].grad is None
    assert inputs[2].grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_keep_dtype(loss, dtype):
    inputs = [torch.full((2, 3), v, dtype=dtype) for v in (0.3, 0.2, 1)]
    per_token, metrics = loss(*inputs, torch.ones(2, 3).bool())
    assert per_token.dtype == dtype
    assert all(metric.dtype == dtype for metric in metrics.values())


@each_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_batch_without_tokens_has_zero_loss_and_gradient(loss, aggregation):
    x = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3).bool()
    total = (loss(x, x.detach(), x.detach(), mask)[0] * token_weights(mask, aggregation, 8)).sum()
    assert total.item() == 0
    total.backward()
    assert torch.equal(x.grad, torch.zeros(2, 3))


HOLED = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()  # lengths 3, 1, and none


@pytest.mark.proves("rlhf_pg.losses.token_weights")
@pytest.mark.parametrize(
    ("aggregation", "denominator", "first_row", "second_row"),
    [
        ("token_mean", None, 1 / 4, 1 / 4),
        ("token_mean", 10, 1 / 10, 1 / 10),
        ("sequence_mean", None, 1 / (2 * 3), 1 / 2),
        ("sequence_mean", 5, 1 / (5 * 3), 1 / 5),
        ("constant", None, 1 / (2 * 8), 1 / (2 * 8)),
        ("constant", 5, 1 / (5 * 8), 1 / (5 * 8)),
    ],
)
@pytest.mark.parametrize("kind", [lambda x: x, float, torch.tensor])
def test_token_weights_by_hand(aggregation, denominator, first_row, second_row, kind):
    denominator = None if denominator is None else kind(denominator)
    weights = token_weights(HOLED, aggregation, 8, denominator)
    expected = [[first_row, 0, first_row, first_row], [second_row, 0, 0, 0], [0] * 4]
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.proves("rlhf_pg.losses.weight_count")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weight_count_is_tokens_or_nonempty_rows(aggregation):
    assert weight_count(HOLED, aggregation).item() == (4 if aggregation == "token_mean" else 2)


@pytest.mark.proves("rlhf_pg.losses.token_weights", "rlhf_pg.losses.weight_count")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@few
@given(case=tokens(1), cuts=st.sets(st.integers(1, 3)))
def test_micro_batch_splits_add_up_to_whole_loss(aggregation, case, cuts):
    mask, per_token = case
    per_token = per_token.nan_to_num()
    weights = token_weights(mask, aggregation, 7, dtype=torch.float64)
    count = sum(weight_count(part, aggregation) for part in mask.split(1))
    edges = [0, *sorted(cuts), len(mask)]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    split = sum(
        (per_token[p] * token_weights(mask[p], aggregation, 7, count, torch.float64)).sum()
        for p in parts
    )
    equal(split, (per_token * weights).sum())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@few
@given(case=tokens(0), pad=st.integers(1, 4))
def test_weights_ignore_padding_and_sum_by_aggregation(aggregation, case, pad):
    (mask,) = case
    weights = token_weights(mask, aggregation, 7, dtype=torch.float64)
    wide = torch.nn.functional.pad(mask, (0, pad), value=False)
    padded = token_weights(wide, aggregation, 7, dtype=torch.float64)
    assert torch.equal(padded, torch.nn.functional.pad(weights, (0, pad)))
    assert (weights[~mask] == 0).all()
    if mask.any():
        rows = mask.any(dim=1).sum().item()
        sums = {"constant": mask.sum().item() / (7 * rows)}
        assert weights.sum().item() == pytest.approx(sums.get(aggregation, 1))


def test_unknown_aggregation_raises():
    for function in (token_weights, weight_count):
        with pytest.raises(ValueError, match="token_mean, sequence_mean, constant"):
            function(HOLED, "mean")


def test_constant_aggregation_without_length_raises():
    with pytest.raises(ValueError, match="max_completion_length"):
        token_weights(HOLED, "constant")


@pytest.mark.proves("rlhf_pg.losses.nll")
def test_nll_by_hand():
    """At the tokens, and nowhere else; NaN in other slots has no gradient."""
    logprobs = torch.tensor([[-1.0, -2.0], [-8.0, -8.0], [-4.0, NAN]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    loss = nll(logprobs, mask)
    assert loss.tolist() == [[1, 2], [0, 0], [4, 0]]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-1, -1], [0, 0], [-1, 0]]


@pytest.mark.proves("rlhf_pg.losses.high_entropy")
@pytest.mark.parametrize(
    ("share", "kept"),
    [(0.2, [9, 8]), (0.3, [9, 8, 7]), (1.0, [*range(10)]), (1e-9, [9]), (0.5, [9, 8, 7, 6, 5])],
)
def test_high_entropy_by_hand(share, kept):
    """Of ten tokens on all processes; this one has the even ones, and a masked slot."""
    own = f64([[8, 2, 4, 0, 6], [0, 0, 0, 0, 0]])
    found = high_entropy(own, f64([3, 8, 1, 9, 0, 2, 7, 4, 6, 5]), share)
    assert own[0][found[0]].tolist() == [x for x in (8, 2, 4, 0, 6) if x in kept]
    assert not high_entropy(own, f64([]), share).any()


def test_none_is_zero_and_has_no_gradient() -> None:
    mask, logprobs = torch.tensor([[True, False]]), torch.tensor([[-1.0, torch.nan]])
    per_token, metrics = POLICY_LOSSES["none"](logprobs, logprobs, logprobs, mask)
    assert per_token.tolist() == [[0, 0]]
    assert metrics == {}
    grad = gradient(POLICY_LOSSES["none"], logprobs, logprobs, logprobs, mask=mask)
    equal(grad, torch.zeros_like(grad))
