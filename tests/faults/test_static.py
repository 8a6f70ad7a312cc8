"""What the code never does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_pg

PACKAGE = Path(rlhf_pg.__file__).parent
WALL = {"time.time", "time.time_ns"} | {f"datetime.datetime.{now}" for now in ("now", "utcnow")}
FORKS = {"os.fork", "os.forkpty", "pty", "multiprocessing", "torch.multiprocessing"} | {
    f"concurrent.futures.{name}" for name in ("process", "ProcessPoolExecutor")
}


def names(source: str) -> Iterator[str]:
    """What the code imports, and the dotted names in it; each as if nothing had been renamed."""
    tree = ast.parse(source)
    meant = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            meant |= {a.asname or a.name: module + a.name for a in node.names}
            yield from (module + alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            yield ".".join([meant.get(root, root), *rest])


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
    assert users(PACKAGE, FORKS) == {}


SAMPLES = {
    "import time\ntime.time()": WALL,
    "import time as clock\nclock.time_ns()": WALL,
    "from time import time as now": WALL,
    "import datetime\ndatetime.datetime.now()": WALL,
    "from datetime import datetime, timedelta\ndatetime.now()": WALL,
    "import os\nos.fork()": FORKS,
    "import os as system\nsystem.fork()": FORKS,
    "from os import fork": FORKS,
    "import pty": FORKS,
    "import multiprocessing as mp": FORKS,
    "from multiprocessing import Pool": FORKS,
    "from multiprocessing.pool import Pool": FORKS,
    "import torch.multiprocessing": FORKS,
    "from torch import multiprocessing as mp": FORKS,
    "import torch\ntorch.multiprocessing.spawn(print)": FORKS,
    "from concurrent.futures import ProcessPoolExecutor": FORKS,
    "from concurrent import futures\nfutures.ProcessPoolExecutor()": FORKS,
    "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()": FORKS,
}


def test_unwanted_names_are_detected(tmp_path) -> None:
    for unwanted in (WALL, FORKS):
        samples = {f"{i}.py": text for i, text in enumerate(SAMPLES) if SAMPLES[text] is unwanted}
        for name, source in {**samples, "good.py": "import time\ntime.monotonic()"}.items():
            (tmp_path / name).write_text(source)
        assert samples.keys() <= users(tmp_path, unwanted).keys()
        assert "good.py" not in users(tmp_path, unwanted)


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


def unguarded(source: str) -> list[str]:
    """Calls of transformers that read files of a model, and may raise anything, outside of
    `opening`.
    """
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and any("opening(" in ast.unparse(i) for i in block.items)
        for inner in ast.walk(block)
    }
    return [
        ast.unparse(call)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).lower().startswith("auto")
        and ast.unparse(call.func).endswith(".from_pretrained")
        and id(call) not in guarded
    ]


def test_every_transformers_load_is_inside_opening() -> None:
    assert not [call for path in PACKAGE.rglob("*.py") for call in unguarded(path.read_text())]
    assert unguarded("with a:\n    AutoConfig.from_pretrained(path)")
    assert not unguarded("with opening('a', b):\n    AutoConfig.from_pretrained(path)")
