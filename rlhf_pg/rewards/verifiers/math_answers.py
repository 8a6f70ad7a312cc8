"""A reward for mathematical answers, compared as mathematics in processes that can be killed."""

import json
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.rewards.verifiers.texts import (
    Columns,
    Scores,
    Seconds,
    against_truths,
    require,
    several,
    share_of_cores,
)

HELPER = Path(__file__).with_name("math_helper.py")
LONGEST = 10_000  # characters at a completion's end that are looked at
STARTING = 120.0  # seconds that a helper may take to begin
ROWS_PER_HELPER = 16  # fewer do not repay the second in which one starts


def math(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    boxed: bool = False,
    timeout: Seconds = 5.0,
    column: str = "answer",
    opened: bool = False,
) -> Scores:
    r"""Reward an answer that is mathematically the truth with 1, else with 0, by math-verify.

    What stands in `\boxed{}` counts before all else; several boxes are one set. The last
    `LONGEST` characters are looked at.

    Args:
        boxed: nothing but `\boxed{}` counts; otherwise any formula or number that can be found.
        timeout: seconds that one comparison may take; one that takes longer gives 0.
        column, opened: see `against_truths`. The truth is an expression, a solution with its answer
            boxed or behind `####`, or a list of right answers.
    """
    require("math_verify", "math")

    def read(truth: Any) -> list[str]:
        return [str(one) for one in several(truth)]

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        count = min(share_of_cores(), -(-len(answers) // ROWS_PER_HELPER))
        questions = [
            {"golds": golds, "answer": answer[-LONGEST:], "boxed": boxed}
            for answer, golds in zip(answers, truths, strict=True)
        ]
        shares = [(HELPERS.get(i), questions[i::count]) for i in range(count)]
        with ThreadPoolExecutor(max(1, count)) as threads:
            said = list(threads.map(lambda share: share[0].ask(share[1], timeout), shares))
        verdicts = (said[i % count][i // count] for i in range(len(answers)))
        return [None if verdict is None else float(verdict) for verdict in verdicts]

    return against_truths("math", completions, columns, column, opened, read, judge)


class Helper:
    """A process that compares answers, started when it is first asked and after each timeout."""

    def __init__(self) -> None:
        self._asked = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, questions: Sequence[dict[str, Any]], seconds: float) -> list[bool | None]:
        """Return the verdict on each question; one that takes longer than `seconds` is False.

        Raises:
            RuntimeError: the process does not start; with what it says.
        """
        with self._asked:
            return [self._answer({**question, "seconds": seconds}) for question in questions]

    def _answer(self, question: dict[str, Any]) -> bool | None:
        process = self._process or self._start()
        said = b""
        with suppress(BrokenPipeError):
            said = _exchange(process, json.dumps(question).encode(), question["seconds"] + STARTING)
        if said:
            verdict: bool | None = json.loads(said)
            return verdict
        self.stop()  # its timer has ended it
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the script's folder is none to import from.
        process = subprocess.Popen(
            [sys.executable, "-P", str(HELPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._process = process
        trial = {"golds": ["1"], "answer": "1", "boxed": False, "seconds": STARTING}
        if not _exchange(process, json.dumps(trial).encode(), STARTING):
            process.kill()
            self._process = None
            complaint = process.communicate()[1].decode(errors="replace").strip()
            raise RuntimeError(f"the process for math rewards does not start: {quoted(complaint)}")
        return process

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _exchange(process: subprocess.Popen[bytes], line: bytes, patience: float) -> bytes:
    """Send a line and return the one that answers it; nothing if none comes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(patience) else b""


class _Helpers:
    """The helpers of this process, each made when it is first wanted."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._made: list[Helper] = []

    def get(self, number: int) -> Helper:
        """Return one by its number."""
        with self._making:
            while len(self._made) <= number:
                self._made.append(Helper())
            return self._made[number]


HELPERS = _Helpers()
