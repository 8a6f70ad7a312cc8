"""The first process inside the sandbox, which runs programs and judges them; run as a script.

Reads a JSON object, {"runs", "limits", "total_timeout", "stops"}, and writes a list of verdicts,
"passed" or why not. As process 1 of its own process namespace it cannot be killed from inside, and
takes all others with it when it ends. Nobody inside can read its memory, so that a program does not
see what output is expected of it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

SET_DUMPABLE = 4  # prctl: 0 hides memory, files and environment from processes of the same user
PAUSE = 0.004  # seconds between two looks at a program
PAGE = resource.getpagesize()
ROOM = "/tmp"  # the only place where a program may write
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": ROOM,
    "TMPDIR": ROOM,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets in the same order each time
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def main() -> None:
    """Run what standard input asks for."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should the machine's memory end, sandboxes go first
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not even get
    job = json.load(sys.stdin)
    deadline = time.monotonic() + job["total_timeout"]
    verdicts: list[str] = []
    for run in job["runs"]:
        if time.monotonic() >= deadline:
            break
        try:
            verdicts.append(verdict(run, job["limits"], deadline))
        except OSError as error:
            verdicts.append(f"not run: {error.strerror}")
        if job["stops"] and verdicts[-1] != "passed":
            break
    json.dump(verdicts, sys.stdout)


def verdict(run: dict[str, Any], limits: dict[str, Any], deadline: float) -> str:
    """Run a program, and return "passed" or why it did not pass."""
    for name in os.listdir(ROOM):  # what the last one left
        remove(os.path.join(ROOM, name))
    program = os.path.join(ROOM, "program.py")
    with open(program, "wb") as file:
        file.write(run["program"].encode(errors="replace"))
    with nameless_file() as given, nameless_file() as said:
        given.write(run["given"].encode(errors="replace"))
        given.seek(0)
        ending = ended([sys.executable, "-P", "-s", program], given, said, limits, deadline)
        said.seek(0)
        output = said.read().decode(errors="replace")
    if ending != "exit 0":
        return ending
    if run["token"] is not None:
        return "passed" if run["token"] in output else "left before its tests"
    return "passed" if lines(output) == lines(run["expected"]) else "other output"


def remove(path: str) -> None:
    """Remove a file or a folder with all that is in it."""
    try:
        os.unlink(path)
    except OSError:
        subprocess.run(["/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL)


def nameless_file() -> Any:
    """Open a file that no program can find by its name."""
    return open(os.open(ROOM, os.O_TMPFILE | os.O_RDWR, 0o600), "w+b")


def ended(command: list[str], given: Any, said: Any, limits: dict[str, Any], end: float) -> str:
    """Run a command until it ends or exceeds a limit, and then end whatever else it has begun."""
    end = min(end, time.monotonic() + limits["timeout"])
    child = subprocess.Popen(
        command,
        stdin=given,
        stdout=said,
        stderr=subprocess.DEVNULL,
        cwd=ROOM,
        env=ENVIRONMENT,
        preexec_fn=lambda: confine(limits),
    )
    try:
        while True:
            child.returncode = reaped(child.pid)
            if child.returncode is not None:
                return f"exit {child.returncode}"
            if abandoned():
                sys.exit("nobody waits for this")
            if time.monotonic() > end:
                return "out of time"
            processes, memory = used()
            if processes > limits["processes"]:
                return "too many processes"
            if memory > limits["memory"]:
                return "too much memory"
            time.sleep(PAUSE)
    finally:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this one
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        child.returncode = child.returncode or 0


def abandoned() -> bool:
    """Return whether the trainer is gone, which was to read what this process says.

    The kernel does not let bubblewrap's death signal pass from root to another user.
    """
    reader = select.poll()
    reader.register(1, 0)  # which leaves POLLERR
    return bool(reader.poll(0))


def confine(limits: dict[str, Any]) -> None:
    """Set the limits that the kernel holds each process to; the program cannot raise them."""
    bounds = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["output"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    # Older kernels count what the user runs elsewhere too. Nothing stops a real root.
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14):
        bounds[resource.RLIMIT_NPROC] = limits["processes"] + 1
    for what, bound in bounds.items():
        resource.setrlimit(what, (bound, bound))


def reaped(child: int) -> int | None:
    """Collect processes that have ended, and return the exit code of one of them, if it has."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == child else code
    return code


def used() -> tuple[int, int]:
    """Return the threads that there are beside this process, and the bytes that they hold."""
    threads = pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # From its third field on: a name, in parentheses, may hold anything.
                fields = file.read().rpartition(b")")[2].split()
                threads, pages = threads + int(fields[17]), pages + int(fields[21])
    return threads, pages * PAGE


def lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends and empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


if __name__ == "__main__":
    main()
