"""What `load_task` says where a library is missing; tests/tasks has the libraries themselves."""

import sys
from types import ModuleType

import pytest

from rlhf_pg.episodes.adapters import load_task


@pytest.mark.parametrize("name", ["arithmetic", "verifiers", "verifiers:", "gym:cartpole"])
def test_unknown_task_is_refused(name) -> None:
    with pytest.raises(ValueError, match="give verifiers:ENV_ID or openenv:URL"):
        load_task(name)


@pytest.mark.parametrize(
    ("library", "found"),
    [("verifiers", None), ("openenv", None), ("verifiers", ModuleType("verifiers"))],
)
def test_missing_or_other_library_is_named_with_remedy(monkeypatch, library, found) -> None:
    monkeypatch.setitem(sys.modules, library, found)
    with pytest.raises(ValueError, match=f'pip install "{library}'):
        load_task(f"{library}:http://127.0.0.1:1")
