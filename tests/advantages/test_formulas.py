"""Advantage estimators against hand-computed numbers, and loops written from the formulas."""

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from rlhf_pg.advantages import (
    ADVANTAGES,
    SCALES,
    AdvantageInputs,
    discounted_returns,
    gae,
    group_normalized,
    group_stats,
    leave_one_out,
    length_adaptive_lam,
    n_step,
    optimal_baseline,
    process_group_normalized,
    total_scores,
)
from rlhf_pg.config.method import ESTIMATORS
from tests.numbers import equal, f64, few, quarters

NAN = float("nan")
quarter = quarters(5)
unit = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])


def loop(mask, number_of_slot):
    """(B,T): number_of_slot(row, columns, k) at the k-th True slot of each row, 0 elsewhere."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        columns = [t for t in range(mask.shape[1]) if mask[row, t]]
        for k, t in enumerate(columns):
            out[row, t] = number_of_slot(row, columns, k)
    return out


@st.composite
def episodes(draw):
    """mask (B,T) with holes, rewards and values with NaN in them, bootstrap values (B,) or None."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    mask = draw(arrays(np.bool_, shape))
    numbers = (np.where(mask, draw(arrays(float, shape, elements=quarter)), np.nan) for _ in "rv")
    bootstrap = draw(st.none() | arrays(float, shape[0], elements=quarter))
    bootstrap = None if bootstrap is None else torch.tensor(bootstrap)
    return torch.tensor(mask), *map(torch.tensor, numbers), bootstrap


@st.composite
def scored(draw, missing=True):
    """scores (N,), some of them NaN, and groups (N,) in any order."""
    score = st.one_of(st.just(NAN), quarter, quarter) if missing else quarter
    names = st.sampled_from([-3, 0, 7, 2**40])
    pairs = draw(st.lists(st.tuples(score, names), min_size=1, max_size=10))
    return f64([score for score, _ in pairs]), torch.tensor([name for _, name in pairs])


def loop_over_groups(scores, groups, advantage_of):
    """advantage_of(score, valid scores of its group), or 0 where the contract asks for it."""
    members = defaultdict(list)
    for score, name in zip(scores.tolist(), groups.tolist(), strict=True):
        if not math.isnan(score):
            members[name].append(score)
    out = []
    for score, name in zip(scores.tolist(), groups.tolist(), strict=True):
        group = members[name]
        neutral = math.isnan(score) or len(group) < 2 or min(group) == max(group)
        out.append(0.0 if neutral else advantage_of(score, group))
    return f64(out)


# ---------------------------------------------------------------------------- discounted_returns


@pytest.mark.proves("rlhf_pg.advantages.discounted_returns")
def test_discounted_returns_by_hand():
    # 1 + 2/2 + 4/4 = 3;  2 + 4/2 = 4;  4
    mask = torch.ones(1, 3).bool()
    assert discounted_returns(f64([[1, 2, 4]]), mask, gamma=0.5).tolist() == [[3, 4, 4]]
    assert discounted_returns(f64([[1, 2, 4]]), mask).tolist() == [[7, 6, 4]]


def test_discounted_returns_count_only_unmasked_slots():
    rewards, mask = f64([[1, NAN, 2, 9, 4, NAN]]), torch.tensor([[1, 0, 1, 0, 1, 0]]).bool()
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[3, 0, 4, 0, 4, 0]]


@pytest.mark.proves("rlhf_pg.advantages.discounted_returns")
@few
@given(case=episodes(), gamma=unit)
def test_discounted_returns_match_loop(case, gamma):
    mask, rewards, _, _ = case

    def slot(row, columns, k):
        return sum(gamma**i * rewards[row, t].item() for i, t in enumerate(columns[k:]))

    equal(discounted_returns(rewards, mask, gamma), loop(mask, slot))


# --------------------------------------------------------------------------------------------- gae


@pytest.mark.proves("rlhf_pg.advantages.gae")
@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        # delta = [.6 - .5, .7 - .6, 1 - .7] = [.1, .1, .3]
        (0.95, [0.46575, 0.385, 0.3]),  # .1 + .95 * .385, .1 + .95 * .3, .3
        (1.0, [0.5, 0.4, 0.3]),  # G - V, G = 1
        (0.0, [0.1, 0.1, 0.3]),  # delta
    ],
)
def test_gae_by_hand(lam, expected):
    rewards, values = f64([[0, 0, 1]]), f64([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3).bool(), lam=lam)
    equal(advantages, f64([expected]))
    equal(returns, f64([expected]) + values)


@pytest.mark.proves("rlhf_pg.advantages.gae")
def test_gae_bootstraps_truncated_row():
    # delta = [.1, .1, .8 - .7]; with V = 0 after the end the last would be -.7
    values = f64([[0.5, 0.6, 0.7]] * 2)
    args = torch.zeros(2, 3).double(), values, torch.ones(2, 3).bool(), 1.0, 0.95
    advantages, _ = gae(*args, bootstrap_value=f64([0.8, 0.0]))
    # the second row: .1 + .95 * -.565 = -.43675, .1 + .95 * -.7 = -.565, -.7
    equal(advantages, f64([[0.28525, 0.195, 0.1], [-0.43675, -0.565, -0.7]]))


@pytest.mark.proves("rlhf_pg.advantages.gae")
def test_gae_with_discount_and_bootstrap_by_hand():
    # delta_1 = 2 + 8/2 - 4 = 2, delta_0 = 1 + 4/2 - 3 = 0; A_0 = 0 + .25 * 2
    advantages, returns = gae(
        f64([[1, 2]]), f64([[3, 4]]), torch.ones(1, 2).bool(), 0.5, 0.5, f64([8])
    )
    assert advantages.tolist() == [[0.5, 2]]
    assert returns.tolist() == [[3.5, 6]]


def test_gae_skips_mask_holes():
    rewards, values = f64([[0, 9, 0, NAN, 1, NAN]]), f64([[0.5, NAN, 0.6, 9, 0.7, NAN]])
    mask = torch.tensor([[1, 0, 1, 0, 1, 0]]).bool()
    advantages, returns = gae(rewards, values, mask)
    equal(advantages, f64([[0.46575, 0, 0.385, 0, 0.3, 0]]))
    equal(returns, f64([[0.96575, 0, 0.985, 0, 1.0, 0]]))


@pytest.mark.proves("rlhf_pg.advantages.gae")
@few
@given(case=episodes(), gamma=unit, lam=unit)
def test_gae_matches_sum_of_deltas(case, gamma, lam):
    mask, rewards, values, bootstrap = case

    def value(row, columns, k):
        if k < len(columns):
            return values[row, columns[k]].item()
        return 0.0 if bootstrap is None else bootstrap[row].item()

    def delta(row, columns, k):
        after = gamma * value(row, columns, k + 1)
        return rewards[row, columns[k]].item() + after - value(row, columns, k)

    def slot(row, columns, k):
        later = range(len(columns) - k)
        return sum((gamma * lam) ** i * delta(row, columns, k + i) for i in later)

    advantages, returns = gae(rewards, values, mask, gamma, lam, bootstrap)
    expected = loop(mask, slot)
    equal(advantages, expected)
    equal(returns, torch.where(mask, expected + values, 0.0))


@pytest.mark.proves("rlhf_pg.advantages.length_adaptive_lam")
def test_length_adaptive_lam_by_hand():
    # alpha 1/2: 1 - 2/4; 1 - 2/3 over a hole; 1 - 2/2; 1 - 2/1 and 1 - 2/0 are held at 0
    rows = [[1, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    equal(length_adaptive_lam(torch.tensor(rows).bool(), 0.5), f64([0.5, 1 / 3, 0, 0, 0]))


# ------------------------------------------------------------------------------------------ n_step


@pytest.mark.proves("rlhf_pg.advantages.n_step")
@pytest.mark.parametrize(
    ("n", "targets"),
    [
        # r = 1, 2, 3; V = 10, 20, 30 and 40 after the end; gamma = 1/2
        (1, [11, 17, 23]),  # 1 + 20/2, 2 + 30/2, 3 + 40/2
        (2, [9.5, 13.5, 23]),  # 1 + 2/2 + 30/4, 2 + 3/2 + 40/4, 3 + 40/2
        (3, [7.75, 13.5, 23]),  # 1 + 2/2 + 3/4 + 40/8
        (9, [7.75, 13.5, 23]),
        (None, [7.75, 13.5, 23]),
    ],
)
def test_n_step_by_hand(n, targets):
    rewards, values, mask = f64([[1, 2, 3]]), f64([[10, 20, 30]]), torch.ones(1, 3).bool()
    advantages, returns = n_step(rewards, values, mask, n, 0.5, f64([40]))
    equal(returns, f64([targets]))
    equal(advantages, f64([targets]) - values)


@pytest.mark.proves("rlhf_pg.advantages.n_step")
@few
@given(case=episodes(), gamma=unit, n=st.none() | st.integers(1, 8))
def test_n_step_matches_loop(case, gamma, n):
    mask, rewards, values, bootstrap = case

    def slot(row, columns, k):
        steps = len(columns) - k if n is None else min(n, len(columns) - k)
        if k + steps < len(columns):
            end = values[row, columns[k + steps]].item()
        else:
            end = 0.0 if bootstrap is None else bootstrap[row].item()
        rewarded = sum(gamma**i * rewards[row, columns[k + i]].item() for i in range(steps))
        return rewarded + gamma**steps * end

    advantages, targets = n_step(rewards, values, mask, n, gamma, bootstrap)
    expected = loop(mask, slot)
    equal(targets, expected)
    equal(advantages, torch.where(mask, expected - values, 0.0))


@few
@given(case=episodes(), gamma=unit)
def test_n_step_extremes_match_gae_extremes(case, gamma):
    mask, rewards, values, bootstrap = case
    for n, lam in ((1, 0.0), (None, 1.0)):
        one_way = n_step(rewards, values, mask, n, gamma, bootstrap)
        other_way = gae(rewards, values, mask, gamma, lam, bootstrap)
        for a, b in zip(one_way, other_way, strict=True):
            equal(a, b)


@pytest.mark.proves("rlhf_pg.advantages.n_step")
def test_n_step_keeps_last_reward_of_truncated_episode():
    # R = [13, 12, 11]; with V as the last return, without its reward, A would be [2, 1, 0]
    ones = torch.ones(1, 3).double()
    advantages, _ = n_step(ones, 10 * ones, ones.bool(), None, bootstrap_value=f64([10]))
    assert advantages.tolist() == [[3, 2, 1]]


@pytest.mark.parametrize("n", [0, -1])
def test_n_step_n_below_one_raises(n):
    with pytest.raises(ValueError, match="n must be at least 1"):
        n_step(f64([[1]]), f64([[1]]), torch.ones(1, 1).bool(), n)


# --------------------------------------------------------------------------------- along a row: all


ALONG_A_ROW = {
    "returns": lambda r, v, m, b: (discounted_returns(r, m, 0.9),),
    "gae": lambda r, v, m, b: gae(r, v, m, 0.9, 0.8, b),
    "n_step": lambda r, v, m, b: n_step(r, v, m, 2, 0.9, b),
}


@pytest.mark.parametrize("name", ALONG_A_ROW)
@few
@given(case=episodes(), pad=st.integers(0, 3))
def test_padding_leaves_results_unchanged_and_zero(name, case, pad):
    mask, rewards, values, bootstrap = case
    width = mask.shape[1]
    for left, right in ((0, pad), (pad, 0)):
        padded = torch.nn.functional.pad(mask, (left, right), value=False)
        r, v = (torch.nn.functional.pad(x, (left, right), value=NAN) for x in (rewards, values))
        plain = ALONG_A_ROW[name](rewards, values, mask, bootstrap)
        for wide, narrow in zip(ALONG_A_ROW[name](r, v, padded, bootstrap), plain, strict=True):
            assert (wide[~padded] == 0).all()
            equal(wide[:, left : left + width], narrow)


# ------------------------------------------------------------------------------- against the group


@pytest.mark.proves("rlhf_pg.advantages.group_stats")
def test_group_stats_by_hand():
    # groups 1, 0, 2 with one gap; 5, 5; and a single 7
    x, groups = f64([1, 5, 0, NAN, 2, 5, 7]), torch.tensor([4, 8, 4, 4, 4, 8, -1])
    stats = group_stats(x, ~x.isnan(), groups)
    assert stats.count.tolist() == [3, 2, 3, 3, 3, 2, 1]
    assert stats.mean.tolist() == [1, 5, 1, 1, 1, 5, 7]
    assert stats.std.tolist() == [1, 0, 1, 1, 1, 0, 0]
    assert stats.constant.int().tolist() == [0, 1, 0, 0, 0, 1, 1]


@pytest.mark.proves("rlhf_pg.advantages.group_normalized")
def test_group_normalized_by_hand():
    # mean 1/4, ddof-1 std sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2; with ddof 0: [1.732, -.577, ...]
    groups = torch.zeros(4).long()
    expected = f64([0.75, -0.25, -0.25, -0.25])
    equal(group_normalized(f64([1, 0, 0, 0]), groups, eps=0), expected / 0.5)
    equal(group_normalized(f64([1, 0, 0, 0]), groups), expected / 0.5001)
    equal(group_normalized(f64([1, 0, 0, 0]), groups, eps=0.5), expected)  # eps joins the std
    equal(group_normalized(f64([1, 0, 0, 0]), groups, "none", eps=0.5), expected)


@pytest.mark.proves("rlhf_pg.advantages.group_normalized")
def test_batch_scale_is_std_of_raw_valid_scores():
    # scores 0, 2, 5, 5, 8: mean 4, squares 16 + 4 + 1 + 1 + 16 = 38, ddof 1: 38/4. Of centred
    # scores it would be 4/4. The lone 8 and the equal 5s count in the std, and get exactly 0.
    scores, groups = f64([0, 5, NAN, 2, 5, 8]), torch.tensor([1, 2, 1, 1, 2, 3])
    expected = f64([-1, 0, 0, 1, 0, 0]) / (9.5**0.5 + 0.25)
    equal(group_normalized(scores, groups, "batch", eps=0.25), expected)


@pytest.mark.proves("rlhf_pg.advantages.leave_one_out")
def test_leave_one_out_by_hand():
    # 1 - 0, 0 - 1/3; the second group: 3 - 7, 7 - 3
    scores, groups = f64([1, 3, 0, 0, 7, 0]), torch.tensor([5, 9, 5, 5, 9, 5])
    equal(leave_one_out(scores, groups), f64([1, -4, -1 / 3, -1 / 3, 4, -1 / 3]))


def test_missing_score_leaves_baseline_and_count():
    scores, groups = f64([1, NAN, 0, 5]), torch.zeros(4).long()
    equal(leave_one_out(scores, groups), f64([-1.5, 0, -3, 4.5]))  # 1 - 5/2, 0 - 6/2, 5 - 1/2
    # mean 2; squares 1 + 4 + 9 = 14, ddof 1: 7
    equal(group_normalized(scores, groups, eps=0), f64([-1, 0, -2, 3]) / 7**0.5)


@pytest.mark.proves("rlhf_pg.advantages.group_normalized")
@pytest.mark.parametrize("scale", SCALES)
@few
@given(case=scored())
def test_group_normalized_matches_loop(scale, case):
    scores, groups = case
    valid = [s for s in scores.tolist() if not math.isnan(s)]

    def advantage(score, group):
        mean = statistics.mean(group)
        if scale == "mean":
            return (score - mean) / mean if mean > 0 else 0.0
        std = statistics.stdev(valid if scale == "batch" else group)
        return (score - mean) / (1 if scale == "none" else std + 0.01)

    expected = loop_over_groups(scores, groups, advantage)
    equal(group_normalized(scores, groups, scale, eps=0.01), expected)


@pytest.mark.proves("rlhf_pg.advantages.leave_one_out")
@few
@given(case=scored())
def test_leave_one_out_matches_loop(case):
    scores, groups = case

    def advantage(score, group):
        others = group.copy()
        others.remove(score)
        return score - statistics.mean(others)

    equal(leave_one_out(scores, groups), loop_over_groups(scores, groups, advantage))


AGAINST_THE_GROUP = {
    **{scale: lambda s, g, scale=scale: group_normalized(s, g, scale) for scale in SCALES},
    "leave_one_out": leave_one_out,
}


@pytest.mark.fault(40, "advantages are exactly 0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", AGAINST_THE_GROUP.values(), ids=AGAINST_THE_GROUP)
@pytest.mark.parametrize("scores", [[0.1] * 7, [0.1] * 7 + [NAN], [NAN] * 3, [0.7], [0.7, NAN]])
def test_constant_group_has_exactly_zero_advantage(function, scores, dtype):
    # beside another group, whose spread is in the batch std; seven 0.1 in float32 sum to a mean
    # that is not 0.1, and the error over a std of 0 + eps is not small
    scores = torch.tensor([*scores, 1.0, 0.0], dtype=dtype)
    groups = torch.tensor([0] * (len(scores) - 2) + [1, 1])
    advantages = function(scores, groups)
    assert (advantages[:-2] == 0).all()
    assert advantages[-2] > 0 > advantages[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", AGAINST_THE_GROUP.values(), ids=AGAINST_THE_GROUP)
def test_group_functions_keep_dtype_round_once_and_detach(function, dtype):
    scores = torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)
    groups = torch.arange(40) % 5
    advantages = function(scores.requires_grad_(), groups)
    assert advantages.dtype == dtype
    assert not advantages.requires_grad
    rtol = torch.finfo(torch.bfloat16).eps / 2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        advantages.double(), function(scores.double(), groups), rtol=1.01 * rtol, atol=1e-6
    )


def test_unknown_scale_raises():
    with pytest.raises(ValueError, match="group, batch, mean, none"):
        group_normalized(f64([1, 0]), torch.zeros(2).long(), "std")


@pytest.mark.proves("rlhf_pg.advantages.group_normalized")
@pytest.mark.parametrize("size", [2, 3])
def test_mean_scale_expects_gradient_of_truncated_log_likelihood(size):
    """log p(correct) = -sum_k (1 - p)^k / k, whose first G - 1 terms are those of pass@k."""
    correct = f64([1.0, 0.0, 0.0, 1.0])
    logits = f64([-1.2, 0.5, 0.4, -2.0]).requires_grad_()
    policy = logits.log_softmax(0)
    wrong = 1 - (policy.exp() * correct).sum()
    objective = -sum(wrong**k / k for k in range(1, size))
    surrogate = 0
    for said in itertools.product(range(4), repeat=size):
        chosen = policy[list(said)]
        advantages = group_normalized(correct[list(said)], torch.zeros(size).long(), "mean")
        surrogate = surrogate + chosen.sum().exp().detach() * (advantages * chosen).mean()
    truth = torch.autograd.grad(objective, logits, retain_graph=True)[0]
    equal(torch.autograd.grad(surrogate, logits)[0], truth)


@pytest.mark.parametrize("power", [-60, 62, 80, 120])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_huge_scores_normalize_bit_identically(power, scale):
    """A score of 2e19 had a std of inf, and every advantage was 0."""
    scores = torch.tensor([0.1, 0.7, 0.3, -0.9, 5.0, 4.0, NAN])
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    expected = group_normalized(scores, groups, scale, eps=0.0)
    assert expected.abs().max() > 0.5
    huge = group_normalized(scores * 2.0**power, groups, scale, eps=0.0)
    assert huge.equal(expected)
    mixed = torch.where(groups == 0, scores, scores * 2.0**power)  # each group on its own
    assert group_normalized(mixed, groups, eps=0.0).equal(group_normalized(scores, groups, eps=0.0))


# --------------------------------------------------------------------------------- optimal_baseline


@pytest.mark.proves("rlhf_pg.advantages.optimal_baseline")
def test_optimal_baseline_by_hand():
    # scores 1, 0, 2 of weights 1, 2, 3: (0 + 6)/5, (1 + 6)/4, (1 + 0)/3; a pair: the other one
    scores, groups = f64([1, 5, 0, 2, 7]), torch.tensor([4, 8, 4, 4, 8])
    weights = torch.tensor([1, 9, 2, 3, 1])
    equal(optimal_baseline(scores, weights, groups), f64([1.2, 7, 1.75, 1 / 3, 5]))


@pytest.mark.proves("rlhf_pg.advantages.optimal_baseline")
@few
@given(case=scored(), data=st.data())
def test_optimal_baseline_matches_loop(case, data):
    scores, groups = case
    weight = st.integers(0, 5)
    weights = data.draw(st.lists(weight, min_size=len(scores), max_size=len(scores)))
    expected = []
    for i, score in enumerate(scores.tolist()):
        others = [
            (weights[j], other)
            for j, other in enumerate(scores.tolist())
            if j != i and groups[j] == groups[i] and not math.isnan(other)
        ]
        total = sum(w for w, _ in others)
        known = total > 0 and not math.isnan(score)
        expected.append(sum(w * s for w, s in others) / total if known else 0.0)
    equal(optimal_baseline(scores, torch.tensor(weights), groups), f64(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_optimal_baseline_of_equal_scores_is_exact(dtype):
    scores = torch.tensor([0.1] * 7 + [NAN], dtype=dtype, requires_grad=True)
    baseline = optimal_baseline(scores, torch.arange(1, 9), torch.zeros(8).long())
    assert baseline.dtype == dtype
    assert not baseline.requires_grad
    assert baseline.tolist() == [*scores[:7].tolist(), 0.0]


def test_optimal_baseline_keeps_precision_far_from_zero():
    # in float32, 1e6 times a weight of 3000 has no digits left for the scores' difference
    scores = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    baseline = optimal_baseline(scores, torch.tensor([3000, 1000, 1000]), torch.zeros(3).long())
    assert (baseline - 1e6).tolist() == pytest.approx([1.5, 0.5, 0.25], abs=0.07)  # an ulp: 1/16


# ------------------------------------------------------------------------- process_group_normalized


def process_case():
    """Two rows of one group; the scores 3, 2 | 0, 3 have mean 2 and ddof-1 variance 6/3."""
    step_scores = f64([[NAN, 3, NAN, 2, NAN], [0, NAN, 3, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
    return step_scores, ~step_scores.isnan(), torch.tensor([6, 6]), mask


@pytest.mark.proves("rlhf_pg.advantages.process_group_normalized")
def test_process_group_normalized_by_hand():
    # normalised 1, 0 | -2, 1 over sqrt(2) + eps; then summed from each slot on
    advantages = process_group_normalized(*process_case(), eps=0.5)
    expected = f64([[1, 1, 0, 0, 0], [-1, 1, 1, 0, 0]]) / (2**0.5 + 0.5)
    equal(advantages, expected)


@st.composite
def stepped(draw):
    """step_scores, step_mask, groups, mask; steps end in True slots of the mask only."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    mask = draw(arrays(np.bool_, shape))
    step_mask = mask & draw(arrays(np.bool_, shape))
    scores = np.where(step_mask, draw(arrays(float, shape, elements=quarter)), np.nan)
    groups = draw(arrays(np.int64, shape[0], elements=st.sampled_from([3, 8])))
    return tuple(map(torch.tensor, (scores, step_mask, groups, mask)))


@pytest.mark.proves("rlhf_pg.advantages.process_group_normalized")
@few
@given(case=stepped())
def test_process_group_normalized_matches_loop(case):
    step_scores, step_mask, groups, mask = case
    of_group = defaultdict(list)
    for row, t in step_mask.nonzero().tolist():
        of_group[groups[row].item()].append(step_scores[row, t].item())

    def slot(row, columns, k):
        group = of_group[groups[row].item()]
        if len(group) < 2 or min(group) == max(group):
            return 0.0
        later = [step_scores[row, t].item() for t in columns[k:] if step_mask[row, t]]
        center, scale = statistics.mean(group), statistics.stdev(group) + 0.01
        return sum((score - center) / scale for score in later)

    equal(process_group_normalized(*case, eps=0.01), loop(mask, slot))


# ------------------------------------------------------------------------------------- ADVANTAGES


def signals(scores, groups, width=2, rows=None, dtype=torch.float64):
    """One token pays the summed score, the last True slot; the first column is masked in row 0.

    The greedy completions have the rows' scores in reverse order.
    """
    scores, groups = torch.tensor(scores, dtype=dtype), torch.tensor(groups)
    mask = torch.ones(len(groups), width).bool()
    mask[0, 0] = False
    rewards = torch.zeros(len(groups), width, dtype=dtype)
    rewards[:, -1] = scores.nansum(1)
    rewards[~mask] = NAN
    rows = rows or slice(0, len(groups))
    values = torch.where(mask, 0.5, NAN).to(dtype)
    return AdvantageInputs(
        rewards=rewards[rows],
        mask=mask[rows],
        scores=scores,
        groups=groups,
        rows=rows,
        action_tokens=mask.sum(1),
        values=values[rows],
        greedy_scores=scores.flip(0)[rows],
        moving_average=0.25,
    )


TWO_GROUPS = ([[1.0], [5.0], [0.0], [2.0], [7.0]], [0, 1, 0, 0, 1])


@pytest.mark.parametrize(
    ("name", "options", "per_row"),
    [
        # groups 1, 0, 2 (mean 1, std 1) and 5, 7 (mean 6, std sqrt 2); all: mean 3, std sqrt 8.5
        ("group_normalized", {}, [0, -(0.5**0.5), -1, 1, 0.5**0.5]),
        ("group_normalized", {"scale_rewards": "none"}, [0, -1, -1, 1, 1]),
        ("group_normalized", {"scale_rewards": "mean"}, [0, -1 / 6, -1, 1, 1 / 6]),
        ("group_normalized", {"scale_rewards": "batch"}, [x / 8.5**0.5 for x in (0, -1, -1, 1, 1)]),
        # the batch's std of 0, -1 / sqrt 2, -1, 1, 1 / sqrt 2 is sqrt(3 / 4)
        ("group_normalized_per_source", {}, [x / 3**0.5 for x in (0, -(2**0.5), -2, 2, 2**0.5)]),
        ("leave_one_out", {}, [0, -2, -1.5, 1.5, 2]),
        ("returns", {}, [1, 5, 0, 2, 7]),
        ("returns_minus_others", {}, [-2.5, 2.5, -3.75, -1.25, 5]),  # 5/4 (s - 3)
        ("returns_minus_mean", {}, [-2, 2, -3, -1, 4]),
        ("returns_minus_moving_average", {}, [0.75, 4.75, -0.25, 1.75, 6.75]),
        ("returns_minus_greedy", {}, [-6, 3, 0, -3, 6]),  # less 7, 2, 0, 5, 1
        # scores 1, 0, 2 of length 1, 2, 2: less 4/4, 5/3, 1/3; 5 less 7, 7 less 5
        ("returns_minus_optimal", {}, [0, -2, -5 / 3, 5 / 3, 2]),
        ("total_returns", {}, [1, 5, 0, 2, 7]),
        ("process_group_normalized", {}, [0, -(0.5**0.5), -1, 1, 0.5**0.5]),  # the outcome's
        ("gae", {"lam": 1.0}, [0.5, 4.5, -0.5, 1.5, 6.5]),  # what is paid, minus V = 1/2
        ("returns_minus_values", {}, [0.5, 4.5, -0.5, 1.5, 6.5]),
        ("n_step", {"n_steps": None}, [0.5, 4.5, -0.5, 1.5, 6.5]),
    ],
)
def test_named_estimators_by_hand(name, options, per_row):
    s = signals(*TWO_GROUPS)
    expected = torch.where(s.mask, f64(per_row)[:, None], 0.0)
    equal(ADVANTAGES[name](s, **options), expected, 1.01e-4)  # eps = 1e-4


@pytest.mark.parametrize("name", ["group_normalized", "process_group_normalized"])
def test_std_epsilon_is_option(name):
    s = signals(*TWO_GROUPS)  # stds 1 and sqrt 2
    expected = f64([0, -1 / (2**0.5 + 0.25), -1 / 1.25, 1 / 1.25, 1 / (2**0.5 + 0.25)])
    expected = torch.where(s.mask, expected[:, None], 0.0)
    equal(ADVANTAGES[name](s, scale_rewards_eps=0.25), expected)
    stepwise = dataclasses.replace(s, step_scores=s.rewards, step_mask=s.mask & (s.rewards != 0))
    if name == "process_group_normalized":  # of steps: 1, 2 and 5, 7
        steps = ADVANTAGES[name](stepwise, scale_rewards_eps=0.25)
        assert steps[3].max().item() == pytest.approx(0.5 / (0.5**0.5 + 0.25))


def test_single_completion_prompts_use_batch_baseline():
    s = signals([[1.0], [5.0], [0.0]], [4, 7, 5])
    assert s.action_tokens.tolist() == [1, 2, 2]
    (u, v, w), (a, b, c) = (1, 2, 2), (1.0, 5.0, 0.0)
    others = [(v * b + w * c) / (v + w), (u * a + w * c) / (u + w), (u * a + v * b) / (u + v)]
    expected = f64([a, b, c]) - f64(others)
    equal(ADVANTAGES["returns_minus_optimal"](s), torch.where(s.mask, expected[:, None], 0.0))


def test_total_return_is_same_at_every_token():
    mask = torch.tensor([[False, True, False, True], [True, True, True, True], [False] * 4])
    rewards = f64([[9, 1, 9, 2], [1, 0, 4, 8], [1, 1, 1, 1]])
    s = dataclasses.replace(signals([[0.0]] * 3, [0, 0, 0], width=4), mask=mask, rewards=rewards)
    expected = torch.where(mask, f64([[2], [3], [0]]), 0.0)  # 1 + 2/2; 1 + 4/4 + 8/8
    equal(ADVANTAGES["total_returns"](s, gamma=0.5), expected)


def test_named_gae_takes_gamma_lam_and_bootstrap():
    s = dataclasses.replace(signals([[3.0]], [0], width=3), bootstrap_value=f64([2.0]))
    # delta = 3 + 1/2 * 2 - 1/2 = 3.5 at the end, and 0 + 1/2 * 1/2 - 1/2 = -1/4 before it
    expected = f64([[0, -0.25 + 0.5 * 0.8 * 3.5, 3.5]])
    equal(ADVANTAGES["gae"](s, gamma=0.5, lam=0.8), expected)


def test_named_n_step_takes_gamma_n_and_bootstrap():
    s = dataclasses.replace(signals([[3.0]], [0], width=4), bootstrap_value=f64([2.0]))
    # V = 1/2, paid 3 in the last of three slots: 1/2 * 1/2 - 1/2, 3 + 1/2 * 2 - 1/2
    equal(ADVANTAGES["n_step"](s, gamma=0.5), f64([[0, -0.25, -0.25, 3.5]]))
    # 1/4 * 1/2 - 1/2, 1/2 * (3 + 1/2 * 2) - 1/2
    equal(ADVANTAGES["n_step"](s, gamma=0.5, n_steps=2), f64([[0, -0.375, 1.5, 3.5]]))


@pytest.mark.parametrize("name", sorted(n for n in ADVANTAGES if n.startswith("returns_minus")))
def test_single_row_baseline_by_hand(name):
    """The mean of one row is its own score; without any baseline the return is left as it is."""
    s = signals([[3.0]], [0])
    expected = {
        "returns_minus_others": 0,
        "returns_minus_mean": 0,
        "returns_minus_greedy": 0,  # it is its own mirror image here
        "returns_minus_optimal": 3,
        "returns_minus_moving_average": 2.75,
        "returns_minus_values": 2.5,
    }
    equal(ADVANTAGES[name](s), f64([[0, expected[name]]]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_ranks_use_global_scores_for_own_rows(name):
    scores, groups = [[1.0], [0.0], [2.0], [5.0], [7.0], [3.0]], [0, 0, 0, 1, 1, 2]
    whole = ADVANTAGES[name](signals(scores, groups))
    for rows in (slice(0, 3), slice(3, 5), slice(5, 6)):  # whole groups, whose own means differ
        equal(ADVANTAGES[name](signals(scores, groups, rows=rows)), whole[rows])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_named_estimators_are_detached_and_zero_if_masked(name, dtype):
    s = signals(*TWO_GROUPS, dtype=dtype)
    s.rewards.requires_grad_()
    advantages = ADVANTAGES[name](s)
    assert advantages.dtype == dtype
    assert advantages.shape == s.mask.shape
    assert not advantages.requires_grad
    assert advantages[0, 0] == 0
    assert advantages.isfinite().all()


def test_sources_are_normalised_apart_by_hand():
    # 0, 2 | 0, 200, 100 | 0 with weights 2, -1/2 and 1, in the two rows that both score, and -:
    # -+ 1 / sqrt 2 twice; then 1, -1, 0, times the sign; the last row has no score at all
    scores = [[0.0, 0.0, 0.0], [4.0, -100.0, 0.0], [NAN, -50.0, 0.0], [NAN, NAN, NAN]]
    s = dataclasses.replace(signals(scores, [0] * 4), weights=f64([2.0, -0.5, 1.0]))
    total = [-(2**0.5) + 0.5, 2**0.5 - 0.5, 0.0, 0.0]
    std = statistics.stdev(total[:3])
    advantages = ADVANTAGES["group_normalized_per_source"](s, scale_rewards_eps=0.0)
    equal(advantages[:, 1], f64(total) / std)


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        # source one: 1, -, 3 -> -2, 0, 2; source two: 4, 6, 8 -> -3, 0, 3
        ("leave_one_out", [0, 0, 0], [-5, 0, 5]),
        # returns 5, 6, 11; baselines 3 + 7, 6 (the first source does not apply), 1 + 5
        ("returns_minus_others", [0, 1, 2], [-5, 0, 5]),
        # lengths 1, 2, 2; baselines 3 + 28/4, 0 + 20/3, 1 + 16/3
        ("returns_minus_optimal", [0, 0, 0], [-5, -2 / 3, 14 / 3]),
    ],
)
def test_missing_source_is_in_no_baseline(name, groups, expected):
    s = signals([[1.0, 4.0], [NAN, 6.0], [3.0, 8.0]], groups)
    equal(ADVANTAGES[name](s)[:, 1], f64(expected))


def test_inapplicable_source_is_in_no_baseline():
    # returns 5, 6, 11, 2; baselines 2 + 1, 7, 3 and the second source's 4
    s = signals([[1.0, 4.0], [NAN, 6.0], [3.0, 8.0], [0.0, 2.0]], [0, 0, 1, 1])
    greedy = f64([[2, 1], [5, 7], [3, NAN], [NAN, 4]])
    s = dataclasses.replace(s, greedy_scores=greedy)
    equal(ADVANTAGES["returns_minus_greedy"](s)[:, 1], f64([2, -1, 8, -2]))


@pytest.mark.parametrize(
    "name", ["leave_one_out", "group_normalized", "group_normalized_per_source"]
)
def test_equal_scores_with_missing_ones_give_exactly_zero(name):
    for others in range(2, 12):
        rows = [[0.1, 0.0]] * others + [[NAN, 0.0]]
        s = signals(rows, [0] * len(rows), dtype=torch.float32)
        assert (ADVANTAGES[name](s) == 0).all()


@pytest.mark.proves("rlhf_pg.advantages.total_scores")
def test_total_scores_fill_missing_source_with_group_mean():
    # first source: mean of 1 and 3 for the gap in group 0; nothing in group 1 has it
    scores = f64([[1, 4], [NAN, 6], [3, 8], [NAN, 5]])
    equal(total_scores(scores, torch.tensor([0, 0, 0, 1])), f64([5, 8, 11, 5]))


def test_low_precision_rewards_are_summed_exactly():
    """In bfloat16 itself 256 + 1 is 256."""
    ones = torch.ones(1, 1024, dtype=torch.bfloat16)
    mask = torch.ones(1, 1024, dtype=torch.bool)
    sums = [
        discounted_returns(ones, mask)[0, 0],
        gae(ones, 0 * ones, mask, lam=1.0)[0][0, 0],
        n_step(ones, 0 * ones, mask, None)[0][0, 0],
    ]
    assert sums == [1024.0] * 3


def test_step_score_outside_action_tokens_is_ignored():
    scores = torch.tensor([[1.0, 9.0], [3.0, 0.0]])
    mask = torch.tensor([[True, False], [True, False]])
    everywhere, groups = torch.ones_like(mask), torch.zeros(2, dtype=torch.int64)
    expected = process_group_normalized(scores, mask, groups, mask)
    assert process_group_normalized(scores, everywhere, groups, mask).equal(expected)


# ------------------------------------------------------------------- true of every named estimator


def steps(scores, groups):
    """All that there may be: step scores at every action token, and a row that was cut off."""
    s = signals(scores, groups, width=3)
    step_scores = torch.where(s.mask, s.rewards + torch.arange(3), NAN)
    end = f64([0.5] + [0.0] * (len(groups) - 1))
    return dataclasses.replace(
        s, step_scores=step_scores, step_mask=s.mask, bootstrap_value=end, values=s.rewards / 3
    )


def tensors(s):
    fields = {field.name: getattr(s, field.name) for field in dataclasses.fields(s)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("planted", [0.0, -1e30, math.inf])
def test_masked_slots_do_not_affect_named_estimators(name, planted):
    s = steps(*TWO_GROUPS)
    keys = ("rewards", "values", "step_scores")
    filled = {key: torch.where(s.mask, getattr(s, key), planted) for key in keys}
    result = ADVANTAGES[name](dataclasses.replace(s, **filled))
    assert result.equal(ADVANTAGES[name](s))  # NaN stands there


@pytest.mark.parametrize(("name", "traits"), ESTIMATORS.items())
def test_estimator_needs_and_reads_what_its_traits_say(name, traits):
    s = signals(*TWO_GROUPS)
    ADVANTAGES[name](s)
    for key, need in (("values", "critic"), ("greedy_scores", "greedy")):
        without = dataclasses.replace(s, **{key: None})
        if traits.needs == need:
            with pytest.raises(AssertionError):
                ADVANTAGES[name](without)
        else:
            ADVANTAGES[name](without)
    unpaid = ADVANTAGES[name](dataclasses.replace(s, rewards=torch.zeros_like(s.rewards)))
    assert unpaid.equal(ADVANTAGES[name](s)) == (traits.reads != "rewards")
