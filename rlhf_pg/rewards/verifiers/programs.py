"""A reward for programs that pass tests, each run in a bubblewrap sandbox of its own."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.rewards.verifiers.texts import Seconds, Unreadable

# A block that is never closed reaches to the end.
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py", "python3", "")
# Says that the tests were reached and passed: a program that ends before them exits with 0 too.
REACHED = "\n\nimport os, sys\nsys.stdout.flush()\nos.write(1, b{token!r})\n"

MB = 1 << 20
LONGEST = 100_000  # bytes of a program
MEMORY = 1024 * MB  # bytes of each process
OUTPUT = MB  # bytes of what it prints, and of any file
DISK = 64 * MB  # bytes of all files together
PROCESSES = 16  # and threads, at the same time
NOBODY = "65534"
# Namespaces of its own for everything, so no network; nothing of the trainer's environment.
ISOLATED = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
    *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
    *("--die-with-parent", "--new-session", "--as-pid-1"),
)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets in the same order each time
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
# What a program complains of is not what a sandbox that does not start complains of.
QUIET = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")


def code(
    answer: str,
    truth: Any,
    *,
    column: str = "answer",
    partial: bool = False,
    timeout: Seconds = 5.0,
    total_timeout: Seconds = 60.0,
) -> float:
    """Reward a Python program that passes all tests of its row with 1, else with 0.

    The program is the last fenced block of the answer, or all of it. The tests in the column are
    Python statements, as text or as a list, or inputs and outputs: a list of objects
    {"input", "output"}, or {"inputs": [...], "outputs": [...]}; either may be JSON text.

    Args:
        column: with the tests.
        partial: the share of tests passed is the reward.
        timeout: seconds for each test.
        total_timeout: seconds for all tests of a completion; those that are left count as failed.
    """
    check_sandbox()
    cases = cases_in(truth)
    if not cases:
        raise Unreadable("there is no test in it")
    program = program_in(answer)
    if not program.strip():
        return 0.0
    passed, deadline = 0, time.monotonic() + total_timeout
    for case in cases:
        seconds = min(timeout, deadline - time.monotonic())
        passes = seconds > 0 and verdict(program, case, seconds) == "passed"
        passed += passes
        if not (passes or partial):
            break
    return passed / len(cases) if partial else float(passed == len(cases))


class Case(NamedTuple):
    """A test: statements behind the program, or an input with the output that it has to give."""

    statements: str | None = None  # Python that raises if the program is wrong; None: by output
    given: str = ""  # standard input
    expected: str = ""  # what has to be printed


def cases_in(truth: Any) -> list[Case]:
    """Return the tests that a column's entry describes; see `code`."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            return [Case(truth)]
    match truth:
        case {"fn_name": str(name)}:
            raise Unreadable(f"calls of {name!r} with arguments are not run: write assertions")
        case {"inputs": [*given], "outputs": [*expected]} if len(given) == len(expected):
            pairs = list(zip(given, expected, strict=True))
        case {"input": given, "output": expected}:
            pairs = [(given, expected)]
        case [*parts]:
            return [case for part in parts for case in cases_in(part)]
        case _:
            raise Unreadable(f"{shown(truth)} is neither Python statements nor inputs with outputs")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise Unreadable("inputs and outputs have to be text")
    return [Case(None, *pair) for pair in pairs]


def program_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer, or all of it if it has no block."""
    blocks = [text for language, text in BLOCK.findall(answer) if language.lower() in PYTHON]
    return blocks[-1] if blocks else answer if "```" not in answer else ""


def verdict(program: str, case: Case, timeout: float) -> str:
    """Return "passed", or why a program does not pass a test."""
    token = secrets.token_hex(16)
    if case.statements is not None:
        program = f"{program}\n\n{case.statements}{REACHED.format(token=token)}"
    end, output = run_in_sandbox(program, case.given, timeout)
    if end != "exit 0":
        return end
    if case.statements is not None:
        return "passed" if token in output else "left before its tests"
    # Blanks at the ends of lines, and empty lines at the end, do not count.
    printed, wanted = (
        [line.rstrip() for line in text.rstrip().split("\n")] for text in (output, case.expected)
    )
    return "passed" if printed == wanted else "other output"


def run_in_sandbox(program: str, given: str = "", timeout: float = 60.0) -> tuple[str, str]:
    """Run a Python program on a standard input; return how it ended, as "exit 0", and its output.

    Raises:
        RuntimeError: there is no sandbox to be had, with what bubblewrap says.
    """
    source = program.encode(errors="replace")
    if b"\0" in source or len(source) > LONGEST:
        return "exit 1", ""
    limits = [f"--as={MEMORY}", f"--fsize={OUTPUT}", "--nofile=64", "--core=0"]
    # Older kernels count what the user runs elsewhere too.
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14):
        limits.append(f"--nproc={PROCESSES + 2}")
    # As process 1 of its own namespace it cannot be killed from inside, and ends all others.
    watched = ("timeout", "--signal=KILL", str(timeout), "prlimit", *limits, *QUIET)
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:  # whose size is limited, unlike that of a pipe
        ended = subprocess.run(
            [*sandbox_command(), *watched, sys.executable, "-P", "-s", "-c", source.decode()],
            input=given.encode(errors="replace"),
            stdout=output,
            stderr=subprocess.PIPE,
            cwd="/",
            env=ENVIRONMENT,
        )
        if ended.stderr:
            raise RuntimeError(quoted(ended.stderr.decode(errors="replace").strip()))
        is_late = time.monotonic() - start >= timeout
        output.seek(0)
        end = "out of time" if is_late and ended.returncode else f"exit {ended.returncode}"
        return end, output.read().decode(errors="replace")


@cache
def check_sandbox() -> None:
    """Make sure that programs can be run in a sandbox on this machine (ValueError)."""
    if shutil.which("bwrap") is None:
        raise ValueError(
            "programs are run inside bubblewrap alone, and there is no `bwrap` on this machine: "
            "apt install bubblewrap (or dnf), version 0.8 or newer"
        )
    try:
        end, output = run_in_sandbox("print(6 * 7)")
    except RuntimeError as error:
        end, output = str(error), ""
    if (end, output) != ("exit 0", "42\n"):
        raise ValueError(
            f"no sandbox can be made here ({end}): it takes bubblewrap 0.8 or newer and user "
            "namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns, a container that allows them); root "
            "needs setpriv too (util-linux)"
        )


@cache
def sandbox_command() -> tuple[str, ...]:
    """Return the command that starts a sandbox, in which all but /tmp and /dev/shm is read-only.

    It shows the system's programs, and Python with its packages. The kernel does not count root's
    processes, so root becomes nobody first, inside a bubblewrap that shows what root alone may
    reach, as a Python below /root.
    """
    visible: list[str] = []
    for name in ("/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        if os.path.islink(name):
            visible += ["--symlink", os.readlink(name), name]
        else:
            visible += ["--ro-bind-try", name, name]
    python = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1]))
    system = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
    for name in dict.fromkeys((*system, *python)):
        if name == "/usr" or not name.startswith("/usr/"):
            for folder in list(Path(name).parents)[-2::-1]:  # open to everybody
                visible += ["--dir", str(folder)]
            visible += ["--ro-bind-try", name, name]
    bwrap = shutil.which("bwrap") or "bwrap"
    half = ("--size", str(DISK // 2), "--tmpfs")
    writable = ("--proc", "/proc", "--dev", "/dev", *half, "/dev/shm", *half, "/tmp")
    sealed = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")
    own = (bwrap, *ISOLATED, *writable, *visible, *sealed)
    if os.geteuid() != 0:
        return own
    see = ("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp")
    caps = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    become = ("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--")
    return (bwrap, *see, *visible, "--die-with-parent", *caps, "--", *become, *own)
