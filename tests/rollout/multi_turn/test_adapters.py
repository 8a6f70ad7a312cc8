"""What `load_task` says where a library is missing; tests/tasks has the libraries themselves."""

import sys
from types import ModuleType

import pytest

from rlhf_pg.rollout.multi_turn.adapters import load_task


@pytest.mark.parametrize("name", ["arithmetic", "verifiers", "verifiers:", "gym:cartpole"])
def test_unknown_task_is_refused(name) -> None:
    with pytest.raises(ValueError, match="give verifiers:ENV_ID or openenv:URL"):
        load_task(name)


@pytest.mark.parametrize("library", ["verifiers", "openenv"])
def test_missing_library_is_named_with_remedy(monkeypatch, library) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f'pip install "{library}'):
        load_task(f"{library}:http://127.0.0.1:1")


def test_verifiers_without_environments_of_modules_is_refused(monkeypatch) -> None:
    newer = ModuleType("verifiers")
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    with pytest.raises(ValueError, match='pip install "verifiers'):
        load_task("verifiers:a")
