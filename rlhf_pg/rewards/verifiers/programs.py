"""A reward for programs that pass tests; each test runs in its own bubblewrap sandbox."""

import ctypes
import json
import os
import platform
import re
import secrets
import shutil
import signal
import struct
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import IO, Any

from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.rewards.verifiers.texts import Seconds, Unreadable

FENCE = "```"
LANGUAGE = re.compile(r"[ \t]*(\w*)")
# Prints a token after the tests, since a program that exits before them has exit status 0 too.
REACHED = "\n\nimport os, sys\nsys.stdout.flush()\nos.write(1, b{token!r})\n"

LONGEST = 100_000  # bytes of a program
# Limits: 1 GB of memory per process; 1 MB for its output and any file; 64 MB for all files.
LIMITS = f"--as={1 << 30} --fsize={1 << 20} --nofile=64 --core=0"
CLEAN = "env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONHASHSEED=0 OMP_NUM_THREADS=1"
SYSTEM = "/usr /bin /lib /lib32 /lib64 /sbin /etc/alternatives /etc/ld.so.cache /etc/localtime"
GRACE = 3.0  # seconds after which a sandbox is ended from outside
# System calls that fail, by their numbers on each of `PROCESSORS`: those that control a process or
# reach far into the kernel.
BLOCKED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
PROCESSORS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # numbers for them in the kernel
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
    cases = cases_in(truth)
    program = program_in(answer)
    if not cases:
        raise Unreadable("there is no test in it")
    if not program.strip():
        return 0.0
    end = time.monotonic() + total_timeout
    results = (passes(program, case, min(timeout, end - time.monotonic())) for case in cases)
    if partial:
        return sum(results) / len(cases)
    return float(all(results))


def cases_in(truth: Any) -> list[str | tuple[str, str]]:
    """Return the tests of a column's entry: statements, or pairs of input and output."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            return [truth]
    match truth:
        case {"fn_name": str(name)} if name:
            raise Unreadable(f"calls of {show(name)} are not run: write assertions")
        case [*parts]:
            return [case for part in parts for case in cases_in(part)]
        case {"input": str(stdin), "output": str(expected)}:
            return [(stdin, expected)]
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            return cases_in([{"input": stdin, "output": expected} for stdin, expected in pairs])
    raise Unreadable(f"{show(truth)} is neither Python statements nor inputs with outputs, as text")


def program_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer, or all of it if it has no block."""
    python = ("python", "py", "python3", "")
    blocks = [text for language, text in fenced_blocks(answer) if language.lower() in python]
    if blocks:
        return blocks[-1]
    return answer if FENCE not in answer else ""


def fenced_blocks(answer: str) -> list[tuple[str, str]]:
    """Return language and text of each fenced block; one that is not closed extends to the end."""
    blocks: list[tuple[str, list[str]]] = []
    is_open = False
    for line in re.findall(r"[^\n]*\n|[^\n]+", answer):
        if is_open:
            start = line.lstrip(" \t")
            if not start.startswith(FENCE):
                blocks[-1][1].append(line)
                continue
            line = start.removeprefix(FENCE)
        _, fence, language = line.partition(FENCE)
        is_open = bool(fence) and line.endswith("\n")
        if is_open:
            blocks.append((LANGUAGE.findall(language)[0], []))
    return [(language, "".join(lines)) for language, lines in blocks]


def passes(program: str, case: str | tuple[str, str], timeout: float) -> bool:
    if isinstance(case, str):
        token = secrets.token_hex(16)
        program = f"{program}\n\n{case}{REACHED.format(token=token)}"
        status, output = run_in_sandbox(program, timeout=timeout)
        return status == 0 and token in output
    status, output = run_in_sandbox(program, case[0], timeout)
    return status == 0 and _printed(output) == _printed(case[1])


def _printed(output: str) -> list[str]:
    """Return lines without whitespace at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def run_in_sandbox(program: str, stdin: str = "", timeout: float = 60.0) -> tuple[int, str]:
    """Run a Python program with an input; return exit status (137: timed out) and output."""
    source = program.encode(errors="replace")
    if b"\0" in source or len(source) > LONGEST or timeout <= 0:
        return 1, ""
    python = [sys.executable, "-P", "-s", "-c", source.decode()]
    # A keyring belongs to a thread, and to the processes that it starts.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_run, python, stdin.encode(errors="replace"), timeout).result()


def _run(python: Sequence[str], stdin: bytes, timeout: float) -> tuple[int, str]:
    join_new_keyring()
    # The size of a file is limited, unlike a pipe's.
    with TemporaryFile() as output, TemporaryFile() as blocked, TemporaryFile() as info:
        blocked.write(seccomp_filter())
        blocked.seek(0)
        files = blocked.fileno(), info.fileno()
        command = [*sandbox_command(timeout, *files), *python]
        with Popen(
            command,
            cwd="/",
            pass_fds=files,
            start_new_session=True,
            stdin=PIPE,
            stdout=output,
            stderr=PIPE,
        ) as process:
            try:
                _, failure = process.communicate(stdin, timeout + GRACE)
            except TimeoutExpired:  # the program has stopped what watches its time
                kill(process, info)
                return 137, ""
        if failure:
            raise no_sandbox(failure.decode(errors="replace").strip())
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def kill(process: Popen[bytes], info: IO[bytes]) -> None:
    """End a sandbox: its first process, with which all others end, and what started it."""
    info.seek(0)
    with suppress(ValueError, ProcessLookupError):  # it had not started
        os.kill(json.loads(info.read())["child-pid"], signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def seccomp_filter() -> bytes:
    """Return a program for the kernel by which the calls in `BLOCKED` fail with EPERM."""
    load = 0x20
    equal = 0x15
    at_least = 0x35
    answer = 0x06
    kills = 1 << 31
    fails = 0x50001
    allows = 0x7FFF0000
    # A call's number is at 0, its processor at 4; a test has how many steps to leave out.
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, PROCESSORS[platform.machine()]),
        (answer, 0, 0, kills),
        (load, 0, 0, 0),
        (at_least, 0, 1, 1 << 30),  # other numbers
        (answer, 0, 0, fails),
    ]
    for name in BLOCKED:
        steps += [(equal, 0, 1, call(name)), (answer, 0, 0, fails)]
    steps.append((answer, 0, 0, allows))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def join_new_keyring() -> None:
    """Leave the trainer's keys. Where that is not allowed, `BLOCKED` still keeps them."""
    ctypes.CDLL(None).syscall(call("keyctl"), 1, None)


def call(name: str) -> int:
    """Return the number of a system call here."""
    if platform.machine() not in PROCESSORS:
        raise no_sandbox(f"the system calls of {platform.machine()} are not known")
    return BLOCKED[name][list(PROCESSORS).index(platform.machine())]


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


def sandbox_command(timeout: float, blocked: int, info: int) -> list[str]:
    """Return the command that runs another in a sandbox, where only /tmp and /dev/shm are writable.

    It shows the system's programs, and Python with its packages. The kernel does not count root's
    processes, so root becomes nobody first, inside another bubblewrap, where nobody may reach
    root's files, such as a Python below /root. `blocked` and `info` are open files: the filter of
    system calls, and where bubblewrap writes which process is the first.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise no_sandbox("there is no `bwrap`")
    visible = []
    python = str(Path(sys.executable).resolve().parents[1])
    for name in dict.fromkeys((*SYSTEM.split(), sys.prefix, sys.base_prefix, python)):
        for folder in reversed(Path(name).parents[:-1]):  # readable by everybody
            visible += ["--dir", str(folder)]
        visible += ["--ro-bind-try", name, name]
    watched = f"timeout --signal=KILL {timeout} prlimit {LIMITS}"
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14):
        watched += " --nproc=18"  # older kernels count all of the user's
    # Nothing inside can write what is taken for an error of bubblewrap.
    quiet = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")
    files = f"--seccomp {blocked} --info-fd {info} {SEALED}"
    inside = [bwrap, *ISOLATED.split(), *visible, *files.split(), *quiet, *watched.split()]
    if os.geteuid() == 0:
        inside = [bwrap, *FOR_ROOT.split(), *visible, *NOBODY.split(), *inside]
    return [*CLEAN.split(), *inside]
