"""pass@k and the majority vote against everything that could have been drawn."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_pg.report.pass_at_k import majority_score, pass_at_k


@pytest.mark.proves("rlhf_pg.report.pass_at_k.pass_at_k")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_matches_subset_count(n) -> None:
    for k in range(1, n + 1):
        found = pass_at_k(torch.arange(n + 1), n, k).tolist()
        for right, value in enumerate(found):
            subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
            assert value == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize("k", [1, 10, 100, 1000])
def test_pass_at_k_keeps_precision_with_many_attempts(k) -> None:
    n, right = 1000, [0, 1, 7, 500, 999, 1000]
    exact = [1 - Fraction(math.comb(n - c, k), math.comb(n, k)) for c in right]
    found = pass_at_k(torch.tensor(right), n, k)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([float(x) for x in exact], abs=1e-13)


@pytest.mark.proves("rlhf_pg.report.pass_at_k.pass_at_k")
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_unbiased_unlike_plug_in_estimate(k) -> None:
    n, p = 6, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    found = pass_at_k(torch.arange(n + 1), n, k).tolist()
    truth = 1 - (1 - p) ** k
    assert sum(w * x for w, x in zip(chances, found, strict=True)) == pytest.approx(truth)
    plain = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chances))
    assert k == 1 or plain < truth - 0.01


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range_raises(k) -> None:
    with pytest.raises(ValueError, match=f"k must be between 1 and the 4 attempts, got {k}"):
        pass_at_k(torch.tensor([1]), 4, k)


@pytest.mark.proves("rlhf_pg.report.pass_at_k.majority_score")
@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["7"], [0.5], 0.5),
        (["7", "8", "7"], [1.0, 0.0, 1.0], 1.0),
        (["7", "8", "8"], [1.0, 0.0, 0.0], 0.0),
        (["7", "8"], [1.0, 0.0], 0.5),  # a tie
        (["9", "7", "8", "8", "7"], [5.0, 1.0, 0.0, 0.0, 1.0], 0.5),  # of two, and not of all
        (["7", "7", "8"], [1.0, 0.2, 9.0], 0.6),  # one was marked down for its form
        ([7, 7.0, "7"], [1.0, 1.0, 0.0], 1.0),  # equal is what compares equal
        ([None, None, 3], [0.0, 0.0, 1.0], 0.0),  # no answer is an answer too
    ],
)
def test_majority_by_hand(answers, scores, expected) -> None:
    assert majority_score(answers, scores) == pytest.approx(expected)


@pytest.mark.proves("rlhf_pg.report.pass_at_k.majority_score")
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-2, 2)), min_size=1, max_size=8))
def test_majority_is_mean_over_possible_winners(attempts) -> None:
    by_answer = {a: [s for b, s in attempts if b == a] for a, _ in attempts}
    most = max(len(scores) for scores in by_answer.values())
    winners = [sum(s) / len(s) for s in by_answer.values() if len(s) == most]
    found = majority_score(*zip(*attempts, strict=True))
    assert found == pytest.approx(sum(winners) / len(winners))
