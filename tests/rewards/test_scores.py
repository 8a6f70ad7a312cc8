"""Scores before they are trained on: totals, clipping, penalties for length."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_pg import GRPOConfig
from rlhf_pg.rewards.scores import at_end, last_true, overlong, replace_sources, sum_step_scores
from rlhf_pg.rewards.shaping import Shaping
from tests.rows import batch_of

NAN = math.nan
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 1, 0]]).bool()
SCORES = torch.tensor(
    [
        [[0.5, NAN], [NAN, NAN], [-2.0, 3.0]],
        [[NAN, 0.0], [NAN, NAN], [NAN, NAN]],
        [[1.0, NAN], [NAN, NAN], [NAN, NAN]],
        [[NAN, NAN], [7.0, 1.0], [NAN, NAN]],
    ],
    dtype=torch.float64,
)


def same(actual, expected):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert actual.allclose(expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.proves("rlhf_pg.rewards.scores.sum_step_scores")
def test_totals_sum_steps_and_are_nan_without_scores():
    same(sum_step_scores(SCORES), [[-1.5, 3.0], [NAN, 0.0], [1.0, NAN], [7.0, 1.0]])


def test_no_rows_give_no_totals():
    assert sum_step_scores(torch.zeros(0, 1, 3)).shape == (0, 3)
    assert at_end(torch.zeros(0), torch.zeros(0, 1).bool()).shape == (0, 1)


@pytest.mark.proves("rlhf_pg.rewards.scores.last_true", "rlhf_pg.rewards.scores.at_end")
def test_end_is_last_action_token():
    assert last_true(MASK).tolist() == [2, 0, 2, 1]
    numbers = torch.tensor([1.0, 2.0, 3.0, 0.0])
    placed = [[NAN, NAN, 1], [2, NAN, NAN], [NAN, NAN, 3], [NAN, 0, NAN]]
    same(at_end(numbers, MASK), placed)
    same(sum_step_scores(at_end(numbers, MASK)[:, :, None])[:, 0], numbers)


@pytest.mark.proves("rlhf_pg.rewards.scores.overlong")
def test_overlong_by_hand():
    lengths = torch.tensor([1, 5, 6, 7, 8, 9, 10, 11])
    by_hand = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]  # L = 10, C = 4: from 6 on
    same(overlong(lengths, 10, 4), by_hand)
    same(overlong(lengths, 10, 4, penalty=8.0), [8 * x for x in by_hand])


@pytest.mark.proves("rlhf_pg.rewards.scores.overlong")
@given(st.integers(1, 60), st.data())
def test_overlong_matches_equation_13(longest, data):
    buffer = data.draw(st.integers(1, longest))

    def punishment(length):
        if length <= longest - buffer:
            return 0.0
        if length <= longest:
            return ((longest - buffer) - length) / buffer
        return -1.0

    lengths = list(range(1, longest + 3))
    expected = [punishment(length) for length in lengths]
    assert overlong(torch.tensor(lengths), longest, buffer).tolist() == pytest.approx(expected)


@pytest.mark.proves("rlhf_pg.rewards.scores.replace_sources")
def test_replaced_row_keeps_only_given_source():
    rows = torch.tensor([True, False, True, False])
    given_ = torch.cat([SCORES, at_end(torch.tensor([-9.0, 0, -9, 0]), MASK)[:, :, None]], dim=2)
    before = given_.clone()
    out = replace_sources(given_, rows, MASK, 2)
    same(given_, before)
    same(sum_step_scores(out), [[0, 0, -9], [NAN, 0, 0], [0, 0, -9], [7, 1, 0]])
    same(out[0, :, 0], [NAN, NAN, 0])  # one 0, at the end, and no steps
    same(out[[1, 3]], given_[[1, 3]])


def test_overlong_penalty_of_tree_is_on_its_longest_path():
    """Four branches of three tokens after an answer of two: twice as many tokens as the limit."""
    args = GRPOConfig(overlong_buffer=4, max_completion_length=8)
    branches = [[4, 1, 1], [7, 1, 1], [10, 1, 1]]
    offsets = [1, 1, 1, 1, 1, *itertools.chain(*branches)]
    batch = batch_of([[1]], [[7] * len(offsets)], offsets=[offsets])
    shaping = Shaping(args, SimpleNamespace(names=[], weights=torch.ones(0)))
    scores = torch.zeros(1, len(offsets), 0)
    assert shaping.add_penalties(scores, batch).nansum() == -1 / 4  # a path has 5 tokens
