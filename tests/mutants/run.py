"""Put every known mistake into the code, one at a time, and see a test fail.

    python -m tests.mutants.run [--jobs 2] [--timeout 120] [name ...]

The package and its tests are imported once. A forked child per mutant gives the function the code
with the mistake in it, and runs the test. A mutant that hangs counts as killed. One that survives,
that cannot be put in or that uses an unknown name is a failure.
"""

import argparse
import ast
import gc
import importlib
import inspect
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants import ROOT, Mutant, all_mutants, find

SENSELESS = ("NameError", "UnboundLocalError")  # so whatever test runs such a mutant, it dies


class Recorder:
    """A plugin of pytest that keeps the first failure, and whether a test was run."""

    def __init__(self) -> None:
        self.failed, self.error, self.ran = "", "", False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran = self.ran or report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = str(getattr(crash, "message", "")).partition("\n")[0]


def swap(mutant: Mutant) -> None:
    """Give the function that is the target the code with the mistake in it, in this process."""
    file, names, *_ = find(mutant.target)
    text = mutant.text()
    assert _heads((ROOT / file).read_text()) == _heads(text), "it is not within a function"
    code = compile(text, str(ROOT / file), "exec")
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in names:
        found = inspect.getattr_static(found, name)
        (code,) = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    found = getattr(found, "fget", None) or getattr(found, "func", None) or found
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), "it is not a function"
    found.__code__ = code


def _heads(text: str) -> list[str]:
    """All of a module that is not the body of a function."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return [ast.dump(node) for node in tree.body]


def child(mutant: Mutant, directory: Path) -> None:
    """Run the killer with the mistake, and leave what came of it."""
    os.setsid()  # what hangs is killed with whatever it has started
    output = os.open(directory / f"{mutant.name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    recorder = Recorder()
    try:
        swap(mutant)
    except Exception as error:
        recorder.error = f"{type(error).__name__}: {error}"
    else:
        # A counterexample is enough: looking for the smallest one takes minutes.
        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")
        options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", "ignore"]
        pytest.main([*options, mutant.killer], plugins=[recorder])
    (directory / f"{mutant.name}.json").write_text(json.dumps(vars(recorder)))
    os._exit(0)


def verdict(mutant: Mutant, directory: Path, hung: bool) -> tuple[str, str]:
    """("killed", by what) or ("SURVIVED" or "BROKEN", why)."""
    if hung:
        return "killed", "it hung"
    result = directory / f"{mutant.name}.json"
    if not result.exists():
        return "killed", "the process died"
    found = json.loads(result.read_text())
    why = f"{found['failed']}: {found['error'][:80]}"
    if found["failed"]:
        return ("BROKEN" if found["error"].startswith(SENSELESS) else "killed"), why
    return ("SURVIVED", mutant.killer) if found["ran"] else ("BROKEN", found["error"] or "no test")


def main(listed: Sequence[Mutant] | None = None) -> int:
    """Try mutants, by default `all_mutants`; the number to exit with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per mutant")
    args = parser.parse_args()
    listed = all_mutants() if listed is None else listed
    waiting = [m for m in listed if not args.names or m.name in args.names]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with redirect_stdout(io.StringIO()):
        files = sorted({m.killer.split("::")[0] for m in waiting})
        pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *files])
    gc.freeze()  # the children need not look through all that for garbage: half their time
    start, count, problems = time.monotonic(), len(waiting), []
    running: dict[Any, tuple[Mutant, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        while waiting or running:
            while waiting and len(running) < args.jobs:
                process = get_context("fork").Process(target=child, args=(waiting[0], directory))
                process.start()
                running[process] = waiting.pop(0), time.monotonic()
            wait([process.sentinel for process in running], timeout=1)
            for process, (mutant, began) in list(running.items()):
                hung = process.is_alive()
                seconds = time.monotonic() - began
                if hung and seconds < args.timeout:
                    continue
                if hung:
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                del running[process]
                word, why = verdict(mutant, directory, hung)
                print(f"{word:8} {mutant.name:45} {seconds:5.1f} s  {why}", flush=True)
                if word != "killed":
                    problems.append(mutant.name)
    print(f"{count} mutants, {time.monotonic() - start:.0f} s; not killed: {problems or 'none'}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
