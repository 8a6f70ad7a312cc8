"""Each test sees the warnings that others have seen already."""

import pytest

from rlhf_pg.rewards.verifiers.texts import warn_once


@pytest.fixture(autouse=True)
def _warns_again() -> None:
    warn_once.cache_clear()
