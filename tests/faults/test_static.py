"""What the code never does."""

import ast
from functools import cache
from pathlib import Path

import pytest

import rlhf_pg

PACKAGE = Path(rlhf_pg.__file__).parent
WALL = {"time.time", "time.time_ns"} | {f"datetime.datetime.{now}" for now in ("now", "utcnow")}
FORKS = {"os.fork", "os.forkpty", "pty", "multiprocessing", "torch.multiprocessing"} | {
    f"concurrent.futures.{name}" for name in ("process", "ProcessPoolExecutor")
}


@cache
def names(source: str) -> set[str]:
    """What the code imports, and the dotted names in it; each as if nothing had been renamed."""
    tree = ast.parse(source)
    meant, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            meant |= {a.asname or a.name: module + a.name for a in node.names}
            found |= {module + alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            found.add(".".join([meant.get(root, root), *rest]))
    return found


def users(package: Path, unwanted: set[str]) -> dict[str, set[str]]:
    """Which files have which of the names, or something in them."""
    beginnings = tuple(f"{name}." for name in unwanted)
    found = {
        path.relative_to(package).as_posix(): {
            name for name in names(path.read_text()) if f"{name}.".startswith(beginnings)
        }
        for path in package.rglob("*.py")
    }
    return {name: used for name, used in found.items() if used}


@pytest.mark.fault(47, "every deadline is of a monotonic clock")
def test_package_does_not_use_wall_clock() -> None:
    assert users(PACKAGE, WALL) == {}


@pytest.mark.fault(48, "no process of ours forks")
def test_package_does_not_fork() -> None:
    found = users(PACKAGE, FORKS)
    spawns = found.pop("boundary/pool.py")
    assert not any("fork" in name.lower() for name in spawns)
    assert found == {}


def test_unwanted_names_are_detected(tmp_path) -> None:
    for i, (source, unwanted) in enumerate(
        [
            ("import time as clock\nclock.time()", WALL),
            ("from datetime import datetime, timedelta\ndatetime.now()", WALL),
            ("import os as system\nsystem.fork()", FORKS),
            ("from torch import multiprocessing as mp", FORKS),
        ]
    ):
        (tmp_path / f"{i}.py").write_text(source)
        assert f"{i}.py" in users(tmp_path, unwanted)


def askers(source: str) -> list[str]:
    """Calls that load what may bring code, and do not say whether to run it: then a terminal is
    asked, and a pipe may answer.
    """
    loads = {"from_pretrained", "from_config"}  # `datasets` runs no code of a dataset since 4.0
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] in loads
        and not ast.unparse(call.func).startswith(
            ("Peft", "type(model)")
        )  # weights of a known class
        and "trust_remote_code" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_load_call_sets_trust_remote_code() -> None:
    assert not [call for path in PACKAGE.rglob("*.py") for call in askers(path.read_text())]
    assert askers("AutoConfig.from_pretrained(path)") == ["AutoConfig.from_pretrained(path)"]
