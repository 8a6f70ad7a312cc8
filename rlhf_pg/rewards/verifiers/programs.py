"""A reward for programs that pass tests; each test runs in its own bubblewrap sandbox."""

import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.rewards.verifiers.texts import Seconds, Unreadable

# A block that is not closed extends to the end.
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
# Prints a token after the tests, since a program that exits before them has exit status 0 too.
REACHED = "\n\nimport os, sys\nsys.stdout.flush()\nos.write(1, b{token!r})\n"

LONGEST = 100_000  # bytes of a program
# Limits: 1 GB of memory per process; 1 MB for its output and any file; 64 MB for all files.
LIMITS = f"--as={1 << 30} --fsize={1 << 20} --nofile=64 --core=0"
CLEAN = "env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONHASHSEED=0 OMP_NUM_THREADS=1"
SYSTEM = "/usr /bin /lib /lib32 /lib64 /sbin /etc/alternatives /etc/ld.so.cache /etc/localtime"
# The first process cannot be killed from inside; when it ends, all others do.
ISOLATED = f"""--unshare-all --unshare-user --disable-userns --cap-drop ALL --uid 65534 --gid 65534
    --hostname sandbox --die-with-parent --new-session --as-pid-1 --proc /proc --dev /dev
    --size {32 << 20} --tmpfs /dev/shm --size {32 << 20} --tmpfs /tmp"""
SEALED = "--remount-ro /dev --remount-ro / --chdir /tmp --"
FOR_ROOT = "--bind /proc /proc --dev-bind /dev /dev --tmpfs /tmp --die-with-parent --cap-drop ALL"
NOBODY = """--cap-add CAP_SETUID --cap-add CAP_SETGID --
    setpriv --reuid 65534 --regid 65534 --clear-groups --"""


def code(
    answer: str,
    truth: Any,
    *,
    column: str = "answer",
    partial: bool = False,
    timeout: Seconds = 5.0,
    total_timeout: Seconds = 60.0,
) -> float:
    """Reward a Python program that passes all tests of its row with 1, else 0.

    The program is the last fenced block of the answer, or all of it. The tests in the column are
    Python statements, as text or as a list, or inputs and outputs: a list of objects
    {"input", "output"}, or {"inputs": [...], "outputs": [...]}; either may be JSON text.

    Args:
        partial: reward the share of tests passed.
        timeout, total_timeout: seconds for each test, and for all tests of a completion; remaining
            tests count as failed.
    """
    check_sandbox()
    cases, program = cases_in(truth), program_in(answer)
    if not cases:
        raise Unreadable("there is no test in it")
    if not program.strip():
        return 0.0
    end = time.monotonic() + total_timeout
    results = (passes(program, case, min(timeout, end - time.monotonic())) for case in cases)
    return sum(results) / len(cases) if partial else float(all(results))


def cases_in(truth: Any) -> list[str | tuple[str, str]]:
    """Return the tests of a column's entry: statements, or pairs of input and output."""
    try:
        truth = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        return [truth]
    match truth:
        case {"fn_name": str(name)} if name:
            raise Unreadable(f"calls of {show(name)} are not run: write assertions")
        case [*parts]:
            return [case for part in parts for case in cases_in(part)]
        case {"input": str(given), "output": str(expected)}:
            return [(given, expected)]
        case {"inputs": [*given], "outputs": [*expected]} if len(given) == len(expected):
            pairs = zip(given, expected, strict=True)
            return cases_in([{"input": one, "output": other} for one, other in pairs])
    raise Unreadable(f"{show(truth)} is neither Python statements nor inputs with outputs, as text")


def program_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer, or all of it if it has no block."""
    python = ("python", "py", "python3", "")
    blocks = [text for language, text in BLOCK.findall(answer) if language.lower() in python]
    return blocks[-1] if blocks else answer if "```" not in answer else ""


def passes(program: str, case: str | tuple[str, str], timeout: float) -> bool:
    if isinstance(case, str):
        token = secrets.token_hex(16)
        program = f"{program}\n\n{case}{REACHED.format(token=token)}"
        status, output = run_in_sandbox(program, timeout=timeout)
        return status == 0 and token in output
    status, output = run_in_sandbox(program, case[0], timeout)
    # Ignore whitespace at the ends of lines, and empty lines at the end.
    printed, wanted = ([*map(str.rstrip, x.rstrip().split("\n"))] for x in (output, case[1]))
    return status == 0 and printed == wanted


def run_in_sandbox(program: str, given: str = "", timeout: float = 60.0) -> tuple[int, str]:
    """Run a Python program with an input; return exit status (137: timed out) and output."""
    source = program.encode(errors="replace")
    if b"\0" in source or len(source) > LONGEST or timeout <= 0:
        return 1, ""
    command = [*sandbox_command(timeout), sys.executable, "-P", "-s", "-c", source.decode()]
    with tempfile.TemporaryFile() as output:  # its size is limited, unlike a pipe's
        sent = given.encode(errors="replace")
        ended = run(command, input=sent, stdout=output, stderr=PIPE, cwd="/")
        if ended.stderr:
            raise no_sandbox(ended.stderr.decode(errors="replace").strip())
        output.seek(0)
        return ended.returncode, output.read().decode(errors="replace")


@cache
def check_sandbox() -> None:
    """Check that programs can run in a sandbox on this machine (else ValueError)."""
    if run_in_sandbox("print(6 * 7)") != (0, "42\n"):
        raise no_sandbox("bwrap failed")


def no_sandbox(why: str) -> ValueError:
    return ValueError(
        f"no sandbox can be made here ({quote(why)}): it needs bubblewrap 0.8 or newer (apt "
        "install bubblewrap), user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns,"
        " user.max_user_namespaces, a container with them); root needs setpriv too (util-linux)"
    )


def sandbox_command(timeout: float) -> list[str]:
    """Return the command that runs another in a sandbox, where only /tmp and /dev/shm are writable.

    It shows the system's programs, and Python with its packages. The kernel does not count root's
    processes, so root becomes nobody first, inside another bubblewrap, where nobody may reach
    root's files, such as a Python below /root.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise no_sandbox("there is no `bwrap`")
    visible, python = [], str(Path(sys.executable).resolve().parents[1])
    for name in dict.fromkeys((*SYSTEM.split(), sys.prefix, sys.base_prefix, python)):
        for folder in reversed(Path(name).parents[:-1]):  # readable by everybody
            visible += ["--dir", str(folder)]
        visible += ["--ro-bind-try", name, name]
    watched = f"timeout --signal=KILL {timeout} prlimit {LIMITS}"
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14):
        watched += " --nproc=18"  # older kernels count all of the user's
    # Keep the program's stderr apart from that of a sandbox that does not start.
    quiet = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")
    inside = [bwrap, *ISOLATED.split(), *visible, *SEALED.split(), *watched.split(), *quiet]
    if os.geteuid() == 0:
        inside = [bwrap, *FOR_ROOT.split(), *visible, *NOBODY.split(), *inside]
    return [*CLEAN.split(), *inside]
