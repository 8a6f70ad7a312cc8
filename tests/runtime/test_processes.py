"""What the processes of a run agree on; tests/distributed has it in several processes."""

import pytest

from rlhf_pg.runtime import Runtime


def test_error_raised_together_is_shared() -> None:
    runtime = Runtime()
    runtime.world, runtime.first_error = 2, lambda failure: failure
    with pytest.raises(ValueError, match="no score") as raised, runtime.raise_together(ValueError):
        raise ValueError("no score")
    assert runtime.is_shared(raised.value)
    assert not runtime.is_shared(ValueError("no score"))
