"""What the code never does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_pg

FILES = sorted(Path(rlhf_pg.__file__).parent.rglob("*.py"))
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
FORKS = {"os.fork", "os.forkpty", "multiprocessing", "pty.fork"}


def names(path: Path) -> Iterator[str]:
    """Dotted names in the code, and what it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users(unwanted: set[str]) -> dict[str, set[str]]:
    """Which files have which of the names."""
    found = {path.name: set(names(path)) & unwanted for path in FILES}
    return {name: used for name, used in found.items() if used}


@pytest.mark.fault(47, "every deadline is of a monotonic clock")
def test_nothing_is_timed_by_the_wall_clock() -> None:
    assert users({"time.monotonic", "time.perf_counter"})  # what is searched for would be found
    assert users(WALL) == {}


@pytest.mark.fault(48, "no process of ours forks")
def test_nothing_forks() -> None:
    assert users(FORKS) == {}
