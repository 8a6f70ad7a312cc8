"""Put every known mistake into the code, one at a time, and see a test fail.

    python -m tests.mutants.run [--jobs 2] [--timeout 120] [--passed] [name ...]

The package and its tests are imported once. A forked child per mutant gets the function with the
mistake in it (`swap`). Where that is not possible or kills nothing, and where the test starts other
processes, the child imports a copy of the repository. A mutant that hangs counts as killed. Four
things are failures: a mutant that survives, one that breaks an import, one that uses an unknown
name (neither proves anything), and a killer that does not pass without any mutant.
"""

import argparse
import ast
import gc
import importlib
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants import ROOT, Mutant, all_mutants, find

OWN = ("rlhf_pg", "tests")
KEPT = ("tests.device.pretend", "tests.device.plugin")  # there once, before torch
# Tests that see a mistake only in programs that they start. Long ones: they come first.
STARTERS = ("tests/faults/test_signals.py",)
SENSELESS = ("NameError", "UnboundLocalError")  # so whatever test runs such a mutant, it dies
LIBRARIES = (
    "accelerate.tracking",
    "datasets",
    "hypothesis.strategies",
    "peft",
    "rich.live",
    "rich.progress",
    "torch",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "tyro",
)


@dataclass
class Run:
    """What pytest said in a child, and how long that took."""

    seconds: float = 0.0
    code: int | None = None  # of pytest; None: it never came to an end
    failed: list[str] = field(default_factory=list)  # node ids, in the order in which they failed
    passed: list[str] = field(default_factory=list)
    error: str = ""  # the first line of the first failure
    output: str = ""
    hung: bool = False


class Recorder:
    """A plugin of pytest that keeps what passed and what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed: list[str] = []
        self.error = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = self.error or str(getattr(crash, "message", "")).partition("\n")[0]
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def copy_of(mutant: Mutant | None, directory: Path) -> None:
    """The files that git knows or would add, with the mistake of `mutant` among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, directory / name)
    if mutant is not None:
        (directory / mutant.file).write_text(mutant.text())


def swap(mutant: Mutant) -> bool:
    """Give the function that is the target the code with the mistake in it, in this process.

    Returns:
        Whether that could be done: not where a class, a module, defaults or decorators change.
    """
    file, names, *_ = find(mutant.target)
    code = compile(mutant.text(), str(ROOT / file), "exec")
    before, after = (ast.parse(text) for text in ((ROOT / file).read_text(), mutant.text()))
    if _heads(before) != _heads(after):
        return False
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in names:
        found = inspect.getattr_static(found, name)
        inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if len(inner) != 1:
            return False
        code = inner[0]
    found = getattr(found, "fget", None) or getattr(found, "func", None) or found
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType) or found.__code__.co_freevars != code.co_freevars:
        return False
    found.__code__ = code
    return True


def _heads(tree: ast.Module) -> list[str]:
    """All of a module that is not the body of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return [ast.dump(node) for node in tree.body]


def import_copy(directory: Path) -> None:
    """Let the copy hold the only `rlhf_pg` and `tests` that this process can import."""
    os.chdir(directory)
    os.environ["PYTHONPATH"] = str(directory)
    sys.path[:] = [str(directory), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    own = [name for name in sys.modules if name.split(".")[0] in OWN]
    for name in [name for name in own if not name.startswith(KEPT)]:
        del sys.modules[name]


def child(directory: Path, mutant: Mutant | None, killers: Sequence[str], copied: bool) -> None:
    """Run pytest with the mistake, in the copy or in this process alone."""
    os.setsid()  # what hangs is killed with whatever it has started
    output = os.open(directory / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True
    if copied:
        import_copy(directory)
    elif mutant is not None and not swap(mutant):
        killers = ()
    # A counterexample is enough: looking for the smallest one takes minutes.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", "ignore"]
    stop = ["-x"] if mutant else []
    code = pytest.main([*options, *stop, *killers], plugins=[recorder]) if killers else 0
    place = directory if copied else ROOT
    assert Path(sys.modules["rlhf_pg"].__file__ or "").is_relative_to(place)
    result = {"code": int(code), **vars(recorder)}
    (directory / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Job:
    """A child at work on `killers`, with `mutant` or without one."""

    mutant: Mutant | None
    killers: Sequence[str]
    copied: bool = False

    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mutant-")).resolve()
        if self.copied:
            copy_of(self.mutant, self.directory)
        self.began = time.monotonic()
        arguments = (self.directory, self.mutant, self.killers, self.copied)
        self.process = get_context("fork").Process(target=child, args=arguments)
        self.process.start()

    def end(self, timeout: float) -> Run | None:
        """What came out of it, or None if it is still at work."""
        seconds = time.monotonic() - self.began
        hung = self.process.is_alive()
        if hung and seconds < timeout:
            return None
        if hung:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        run = Run(seconds=seconds, hung=hung)
        run.output = (self.directory / "output.txt").read_text(errors="replace")
        result = self.directory / "result.json"
        if result.exists():
            run = Run(**json.loads(result.read_text()), seconds=seconds, output=run.output)
        shutil.rmtree(self.directory)
        return run


def each(jobs: Sequence[Job], at_once: int, timeout: float) -> Iterator[tuple[Job, Run]]:
    """Run all jobs, `at_once` at a time, and give each with its outcome as it ends."""
    waiting = deque(jobs)
    running: list[Job] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.popleft())
            running[-1].start()
        wait([job.process.sentinel for job in running], timeout=1)
        for job in list(running):
            run = job.end(timeout)
            if run is not None:
                running.remove(job)
                yield job, run


def import_all(files: Sequence[str]) -> None:
    """Import the libraries, the package and the tests, which the children then have."""
    for name in LIBRARIES:
        importlib.import_module(name)
    with redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *files])
    gc.freeze()  # the children need not look through all that for garbage: half their time


def without_mutants(killers: Sequence[str], at_once: int, timeout: float) -> list[str]:
    """What is wrong with the killers themselves: each has to exist and to pass."""
    files: dict[str, list[str]] = {}
    for killer in killers:
        files.setdefault(killer.split("::")[0], []).append(killer)
    problems = []
    for job, run in each([Job(None, own) for own in files.values()], at_once, timeout * 5):
        passed = {*run.passed, *(node.split("[")[0] for node in run.passed)}
        missing = [killer for killer in job.killers if killer not in passed]
        if run.code != 0 or missing:
            what = ", ".join(run.failed or missing or job.killers)
            problems.append(f"without any mutant, {what} does not pass\n{run.output[-2000:]}")
    return problems


def verdict(run: Run) -> tuple[str, str]:
    """("killed", by what) or ("SURVIVED" or "BROKEN", why)."""
    if run.failed and run.error.startswith(SENSELESS):
        return "BROKEN", f"{run.failed[0]}: {run.error[:80]}"
    if run.failed:
        return "killed", f"{run.failed[0]}: {run.error[:80]}"
    if run.hung:
        return "killed", "it hung"
    if run.code is None:
        return "killed", "the process died"
    if run.code == pytest.ExitCode.OK:
        return "SURVIVED", f"{len(run.passed)} tests passed"
    return "BROKEN", run.output.strip().splitlines()[-1]


def with_mutants(mutants: Sequence[Mutant], at_once: int, timeout: float) -> list[str]:
    """Names and outcomes of the mutants that no test has killed."""
    problems = []
    jobs = [
        Job(m, m.killers, copied=any(k.startswith(STARTERS) for k in m.killers)) for m in mutants
    ]
    jobs.sort(key=lambda job: not job.copied)
    while jobs:
        again = []
        for job, run in each(jobs, at_once, timeout):
            assert job.mutant is not None
            word, why = verdict(run)
            if not job.copied and not run.failed and not run.hung:
                again.append(Job(job.mutant, job.killers, copied=True))
                continue
            print(f"{word:8} {job.mutant.name:45} {run.seconds:5.1f} s  {why}", flush=True)
            if word != "killed":
                problems.append(f"{job.mutant.name} ({job.mutant.target}) {word}: {why}")
        jobs = again
    return problems


def unfit(mutants: Sequence[Mutant]) -> list[str]:
    """The messages of the mutants that cannot be made."""
    problems = []
    for mutant in mutants:
        try:
            mutant.text()
        except ValueError as error:
            problems.append(str(error))
    return problems


def main(listed: Sequence[Mutant] | None = None) -> int:
    """Try mutants, by default `all_mutants`; the number to exit with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per mutant")
    parser.add_argument("--passed", action="store_true", help="the killers pass: make test said so")
    args = parser.parse_args()
    start = time.monotonic()
    listed = all_mutants() if listed is None else listed
    mutants = [m for m in listed if not args.names or m.name in args.names]
    unknown = set(args.names) - {m.name for m in mutants}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    killers = sorted({killer for mutant in mutants for killer in mutant.killers})
    import_all(sorted({killer.split("::")[0] for killer in killers}))
    problems = unfit(mutants)
    if not args.passed:
        problems = problems or without_mutants(killers, args.jobs, args.timeout)
    problems = problems or with_mutants(mutants, args.jobs, args.timeout)
    seconds = time.monotonic() - start
    for problem in problems:
        print(problem, file=sys.stderr)
    outcome = f"{len(problems)} problems" if problems else "every one is killed"
    print(f"{len(mutants)} mutants, {len(killers)} killers, {seconds:.0f} s: {outcome}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
