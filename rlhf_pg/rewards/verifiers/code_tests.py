"""A reward for programs that pass tests, which run in a sandbox."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.rewards.verifiers.sandbox import MB, Sandbox, check
from rlhf_pg.rewards.verifiers.texts import (
    Said,
    Scores,
    Seconds,
    Unreadable,
    share_of_cores,
)

# A block that is never closed reaches to the end.
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py", "python3", "")
# Says that the tests were reached and passed: a program that ends before them exits with 0 too.
REACHED = "\n\nimport os, sys\nsys.stdout.flush()\nos.write(1, b{token!r})\n"


@dataclass(frozen=True)
class Case:
    """A test: statements behind the program, or an input with the output that it has to give."""

    statements: str | None = None  # Python that raises if the program is wrong; None: by output
    given: str = ""  # standard input
    expected: str = ""  # what has to be printed

    def verdict(self, program: str, sandbox: Sandbox) -> str:
        """Return "passed", or why a program does not pass."""
        if self.statements is None:
            how, output = sandbox.run(program, self.given)
            passes = lines(output) == lines(self.expected)
            return how if how != "exit 0" else "passed" if passes else "other output"
        token = secrets.token_hex(16)
        how, output = sandbox.run(f"{program}\n\n{self.statements}{REACHED.format(token=token)}")
        return how if how != "exit 0" else "passed" if token in output else "left before its tests"


def lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends and empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def code(
    said: Said,
    *,
    column: str = "answer",
    partial: bool = False,
    timeout: Seconds = 5.0,
    total_timeout: Seconds = 60.0,
    memory_mb: Annotated[int, Field(ge=64)] = 1024,
) -> Scores:
    """Reward a Python program that passes all tests of its row with 1, else with 0.

    The program is the last fenced block of the answer, or all of it. The tests in the column are
    Python statements, as text or as a list, or inputs and outputs: a list of objects
    {"input", "output"}, or {"inputs": [...], "outputs": [...]}; either may be JSON text.

    Args:
        column: with the tests.
        partial: the share of tests passed is the reward.
        timeout: seconds for each test.
        total_timeout: seconds for all tests of a completion; those that are left count as failed.
        memory_mb: memory of each process.
    """
    check()
    sandbox = Sandbox(timeout, memory_mb * MB)

    def read(truth: Any) -> list[Case]:
        if tests := cases_in(truth):
            return tests
        raise Unreadable("there is no test in it")

    def score(answer: str, tests: Sequence[Case]) -> float:
        program = program_in(answer)
        if not program.strip():
            return 0.0
        passed, deadline = 0, time.monotonic() + total_timeout
        for test in tests:
            left = deadline - time.monotonic()
            limited = replace(sandbox, timeout=min(timeout, left))
            passes = left > 0 and test.verdict(program, limited) == "passed"
            passed += passes
            if not (passes or partial):
                break
        return passed / len(tests) if partial else float(passed == len(tests))

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        with ThreadPoolExecutor(share_of_cores()) as threads:
            return list(threads.map(score, answers, truths))

    return said.against(column, read, judge)


def program_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer, or all of it if it has no block."""
    blocks = [found for found in BLOCK.findall(answer) if found[0].lower() in PYTHON]
    return blocks[-1][1] if blocks else answer if "```" not in answer else ""


def cases_in(truth: Any) -> list[Case]:
    """Return the tests that a column's entry describes; see `code`.

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
