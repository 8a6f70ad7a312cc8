"""The choice between sampling with drafts and without, from times made by hand."""

from itertools import pairwise

import pytest

from rlhf_pg.rollout.native.pace import LONGEST_NAP, LONGEST_WAKE, SELDOM, Pace


@pytest.mark.parametrize(
    ("rate", "length"), [(0.0, 0), (0.3, 0), (0.4, 1), (0.7, 2), (0.9, 8), (1.0, 0)]
)
def test_worth_by_hand(rate, length):
    """0.7^2 = 0.49 > 0.4 > 0.7^3; 0.9^8 = 0.43 > 0.4 > 0.9^9; a rate of 1 was never observed."""
    assert Pace().worth(rate) == length


def measured(rows: int, plain: float, drafted: float) -> Pace:
    """Passes over so many rows, with these seconds for a token."""
    pace = Pace()
    for drafts, price in ((False, plain), (True, drafted)):
        for gained in (rows, 3 * rows):
            pace.passed(rows, gained, drafts, price * gained)
    return pace


@pytest.mark.parametrize(("plain", "drafted"), [(1.0, 0.9), (0.9, 1.0)])
def test_cheaper_way_is_taken_and_other_one_seldom(plain, drafted):
    pace = measured(10, plain, drafted)
    tried = [pace.tries(10) for _ in range(2 * SELDOM)]
    assert tried.count(plain < drafted) == 2
    assert tried[SELDOM - 1] == tried[-1] == (plain < drafted)


def test_passes_are_compared_with_those_of_about_as_many_rows():
    pace = measured(10, plain=1.0, drafted=2.0)
    pace.passed(100, 100, False, 200.0)
    pace.passed(100, 300, True, 300.0)
    assert not pace.tries(12)
    assert pace.tries(90)
    assert pace.tries(40)  # never measured: begin with drafts


def test_latest_passes_count_most():
    pace = measured(10, plain=1.0, drafted=2.0)
    for _ in range(60):
        pace.passed(10, 30, True, 15.0)
    assert pace.tries(10)


def rollouts(pace: Pace, count: int, plain: float, drafted: float) -> list[bool]:
    """Rollouts of 100 tokens with these seconds for a token, and which of them were drafted."""
    found = []
    for _ in range(count):
        awake = pace.begin()
        found.append(awake)
        pace.passed(1, 100, awake, 100 * (drafted if awake else plain))
    return found


def test_naps_grow_while_drafts_do_not_pay():
    drafted = rollouts(Pace(), 120, plain=1.0, drafted=1.5)
    awake = [i for i, one in enumerate(drafted) if one]
    naps = [later - one - 1 for one, later in pairwise(awake)]
    assert naps[:5] == [1, 3, 7, LONGEST_NAP, LONGEST_NAP]


def test_drafts_that_pay_are_compared_again_now_and_then():
    drafted = rollouts(Pace(), 3 * (LONGEST_WAKE + 1), plain=1.0, drafted=0.5)
    assert drafted.count(False) <= 6
    assert not all(drafted[-LONGEST_WAKE - 1 :])


def test_drafts_that_begin_to_pay_are_used():
    pace = Pace()
    rollouts(pace, 20, plain=1.0, drafted=1.5)
    assert rollouts(pace, 120, plain=1.0, drafted=0.5).count(True) > 60
