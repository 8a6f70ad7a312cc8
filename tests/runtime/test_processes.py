"""What the processes of a run agree on; tests/distributed has it in several processes."""

from types import SimpleNamespace

import pytest

from rlhf_pg.runtime import Runtime


def test_error_raised_together_needs_no_meeting() -> None:
    """All have it at the same place, however long each takes to get from there to the save."""
    runtime = Runtime()
    runtime.watch = SimpleNamespace(leave_together=lambda place: False)  # nobody came in time
    with pytest.raises(ValueError, match="no score") as raised, runtime.raise_together(ValueError):
        raise ValueError("no score")
    assert runtime.leave_together("step 3", raised.value)
    assert not runtime.leave_together("step 3", ValueError("no score"))
