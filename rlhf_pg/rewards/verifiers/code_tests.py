"""A reward for programs that pass tests, which run in a sandbox."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.config.fields import config, option
from rlhf_pg.rewards.verifiers.sandbox import MB, Sandbox, check
from rlhf_pg.rewards.verifiers.verifier import Scores, TruthVerifier, Unreadable, share_of_cores

# A block that is never closed reaches to the end.
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py", "python3", "")
# Says that the tests were reached and passed: a program that ends before them exits with 0 too.
REACHED = "\n\nimport os, sys\nsys.stdout.flush()\nos.write(1, b{token!r})\n"


@dataclass(frozen=True)
class Case:
    """A test: statements that follow the program, or an input with the output that it has to give.

    Args:
        statements: Python that raises if the program is wrong; None for a test by output.
        given, expected: standard input, and what has to be printed.
    """

    statements: str | None = None
    given: str = ""
    expected: str = ""

    def run(self, program: str) -> dict[str, Any]:
        """Return what the sandbox has to run, and how to tell whether it passed."""
        if self.statements is None:
            output = {"expected": self.expected, "token": None}
            return {"program": program, "given": self.given, **output}
        token = secrets.token_hex(16)
        source = f"{program}\n\n{self.statements}{REACHED.format(token=token)}"
        return {"program": source, "given": "", "expected": "", "token": token}


@config
class Code(TruthVerifier):
    """A reward of 1 for a Python program that passes all tests of its row, else 0.

    The program is the last fenced block of the answer, or all of it. The tests in the column are
    Python statements, as text or as a list, or inputs and outputs: a list of objects
    {"input", "output"}, or {"inputs": [...], "outputs": [...]}; either may be JSON text.

    Args:
        partial: the share of tests passed is the reward.
        timeout: seconds for each test.
        total_timeout: seconds for all tests of a completion; those that are left count as failed.
        memory_mb: memory of each process, and of all processes of a test together.
        processes: processes and threads of a test.
        output_mb: size of what a test prints, and of any file that it writes.
        disk_mb: size of all files of a test together, in /tmp and /dev/shm.
        concurrency: completions that are tested at the same time; by default one per core.
        column: see `TruthVerifier`.
    """

    kind: ClassVar[str] = "code"
    partial: bool = False
    timeout: float = option(5.0, gt=0)
    total_timeout: float = option(60.0, gt=0)
    memory_mb: int = option(1024, ge=64)
    processes: int = option(16, ge=1)
    output_mb: float = option(1.0, gt=0)
    disk_mb: int = option(64, ge=1)
    concurrency: int | None = option(None, ge=1)

    def __post_init__(self) -> None:
        check()

    def read(self, truth: Any) -> list[Case]:
        tests = cases_in(truth)
        if not tests:
            raise Unreadable("there is no test in it")
        return tests

    def judge(self, answers: Sequence[str], truths: Sequence[list[Case]]) -> Scores:
        with ThreadPoolExecutor(self.concurrency or share_of_cores()) as threads:
            return list(threads.map(self._score, answers, truths))

    def _score(self, answer: str, tests: Sequence[Case]) -> float:
        program = program_in(answer)
        if not program.strip():
            return 0.0
        runs = [test.run(program) for test in tests]
        passed = self._sandbox().verdicts(runs, not self.partial).count("passed")
        return passed / len(tests) if self.partial else float(passed == len(tests))

    def _sandbox(self) -> Sandbox:
        return Sandbox(
            timeout=self.timeout,
            total_timeout=self.total_timeout,
            memory=self.memory_mb * MB,
            processes=self.processes,
            output=int(self.output_mb * MB),
            disk=self.disk_mb * MB,
        )


def program_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer, or all of it if it has no block."""
    blocks = [found for found in BLOCK.findall(answer) if found[0].lower() in PYTHON]
    return blocks[-1][1] if blocks else answer if "```" not in answer else ""


def cases_in(truth: Any) -> list[Case]:
    """Return the tests that a column's entry describes; see `Code`.

    Raises:
        Unreadable: they are of none of these forms.
    """
    match truth:
        case str():
            stated = _json(truth)
            return [Case(statements=truth)] if stated is None else cases_in(stated)
        case {"fn_name": str(name)}:
            raise Unreadable(f"calls of {name!r} with arguments are not run: write assertions")
        case {"inputs": [*given], "outputs": [*expected]} if len(given) == len(expected):
            return [_by_output(*pair) for pair in zip(given, expected, strict=True)]
        case {"input": given, "output": expected}:
            return [_by_output(given, expected)]
        case [*parts]:
            return [test for part in parts for test in _one(part)]
    raise Unreadable("tests are Python statements, or inputs with outputs")


def _one(part: Any) -> list[Case]:
    if isinstance(part, Mapping):
        return cases_in(part)
    if isinstance(part, str):
        return [Case(statements=part)]
    raise Unreadable(f"{shown(part)} is no test")


def _by_output(given: Any, expected: Any) -> Case:
    if not isinstance(given, str) or not isinstance(expected, str):
        raise Unreadable("inputs and outputs have to be text")
    return Case(given=given, expected=expected)


def _json(text: str) -> Any:
    """Return what a text that looks like JSON says; None if it is something else, as Python."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
