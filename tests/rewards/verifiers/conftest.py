"""Each test sees the warnings that others have seen already, and looks for packages itself."""

import pytest

from rlhf_pg.rewards.verifiers.texts import require, warn_once


@pytest.fixture(autouse=True)
def _anew() -> None:
    warn_once.cache_clear()
    require.cache_clear()
