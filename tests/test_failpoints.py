"""The failpoints themselves; what a run makes of each is in `tests/faults`."""

import errno
import os

import pytest

from rlhf_pg import failpoints
from rlhf_pg.failpoints import failpoint


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(failpoints, "_passed", failpoints.Counter())


def test_without_the_variable_nothing_happens(monkeypatch) -> None:
    monkeypatch.delenv("RLHF_PG_FAULT", raising=False)
    failpoint("step")


def test_it_fails_there_at_that_passage_and_only_then(monkeypatch) -> None:
    monkeypatch.setenv("RLHF_PG_FAULT", "step:enospc@2")
    for point in ("step", "reward", "reward"):
        failpoint(point)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        failpoint("step")
    failpoint("step")


@pytest.mark.parametrize("wanted", ["stop:kill", "step:explode", "step", "step:kill@x", ":"])
def test_what_there_is_not_is_refused_where_any_point_is_passed(monkeypatch, wanted) -> None:
    monkeypatch.setenv("RLHF_PG_FAULT", wanted)
    with pytest.raises(ValueError, match=r"points are rollout, .*; actions are kill"):
        failpoint("rollout")
