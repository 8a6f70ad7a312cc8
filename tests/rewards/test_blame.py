"""The search for rows on which a call fails, with calls that are counted."""

import pytest

from rlhf_pg.rewards.answers import CallFailed
from rlhf_pg.rewards.blame import MOST_BLAMED, Answer, Failed, settled


class Calls:
    """Calls that fail with one of the bad rows; a score is how many rows were called together."""

    def __init__(self, *bad):
        self.bad, self.made = set(bad), []

    def __call__(self, rows):
        self.made.append(list(rows))
        if found := self.bad.intersection(rows):
            raise CallFailed(f"raised {min(found)}")
        return Answer([len(rows)] * len(rows), {"row": list(rows)}, {"calls": [1.0]})


def test_call_that_succeeds_is_made_once():
    calls = Calls()
    assert settled(calls, 3).scores == [3] * 3
    assert calls.made == [[0, 1, 2]]


def test_others_are_scored_together():
    answer = settled(Calls(1), 4)
    assert answer.scores == [3, Failed("raised 1", alone=True), 3, 3]
    assert answer.extra == {"row": [0, None, 2, 3]}
    assert answer.metrics == {"calls": [1.0]}


def test_search_stops_at_first_row_for_run_that_stops():
    calls = Calls(1, 2)
    assert settled(calls, 4, stops=True).scores[1] == Failed("raised 1", alone=True)
    assert calls.made == [[0, 1, 2, 3], [0], [1]]


def test_search_is_bounded():
    calls = Calls(*range(1, 50))
    answer = settled(calls, 50)
    assert [isinstance(score, Failed) for score in answer.scores] == [False] + [True] * 49
    assert len(calls.made) == 1 + 1 + MOST_BLAMED + 1


@pytest.mark.parametrize("options", [{"blames": False}, {"stops": True}, {}])
def test_failure_of_rows_together_is_failure_of_all(options):
    def attempt(rows):
        if len(rows) > 1:
            raise CallFailed("raised together")
        return Answer([1.0], {}, {})

    assert settled(attempt, 3, **options).scores == [Failed("raised together")] * 3


def test_failure_that_passes_is_no_failure():
    outcomes = iter([CallFailed("raised once")])

    def attempt(rows):
        if error := next(outcomes, None):
            raise error
        return Answer([float(len(rows))] * len(rows), {}, {})

    assert settled(attempt, 2).scores == [2.0, 2.0]
