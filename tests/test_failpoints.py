"""The failpoints themselves; what a run makes of each is in `tests/faults`."""

import errno
import os

import pytest

from rlhf_pg import failpoints
from rlhf_pg.failpoints import failpoint


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(failpoints, "_passed", failpoints.Counter())


def test_unset_variable_disables_failpoint(monkeypatch) -> None:
    monkeypatch.delenv("RLHF_PG_FAULT", raising=False)
    failpoint("step")


def test_failpoint_fails_only_at_named_pass(monkeypatch) -> None:
    monkeypatch.setenv("RLHF_PG_FAULT", "step:enospc@2")
    for point in ("step", "reward", "reward"):
        failpoint(point)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        failpoint("step")
    failpoint("step")
