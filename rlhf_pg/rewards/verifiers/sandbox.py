"""A sandbox for programs that a model has written: bubblewrap, started anew for each completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.quoted import quoted

OLDEST = (0, 8)  # the first version that forbids user namespaces inside
INSTALL = "install it (apt install bubblewrap, dnf install bubblewrap)"
INIT = Path(__file__).with_name("sandbox_init.py")
PATIENCE = 30.0  # seconds beyond its own limit after which a sandbox is killed from outside
MB = 1 << 20
NOBODY = "65534"
# Namespaces of its own for everything, so no network; nothing of the trainer's environment.
ISOLATED = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
    *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
    *("--die-with-parent", "--new-session", "--as-pid-1"),
)


@dataclass(frozen=True)
class Sandbox:
    """Limits within which programs run.

    Args:
        timeout, total_timeout: seconds for each run, and for all of a call.
        memory: bytes, of each process as of all together.
        processes: processes and threads that there may be at the same time.
        output: bytes of the output, and of any file.
        disk: bytes of all files together.
    """

    timeout: float
    total_timeout: float
    memory: int
    processes: int
    output: int
    disk: int

    def verdicts(self, runs: Sequence[dict[str, Any]], stops: bool) -> list[str]:
        """Run programs one after another, each in an empty /tmp.

        Args:
            runs: for each its source ("program"), its standard input ("given"), and how to tell
                whether it passes: what it has to print ("expected"), or a word that its output has
                to contain ("token").
            stops: leave out the runs that follow one that does not pass.

        Returns:
            One verdict per run, "passed" or why not; fewer, if time is over or `stops` says so.

        Raises:
            RuntimeError: there is no sandbox to be had, with what bubblewrap says.
        """
        said, errors = self.output_of(runs, stops)
        if errors.startswith("bwrap:"):
            raise RuntimeError(f"the sandbox does not start: {quoted(errors)}")
        with suppress(ValueError):
            told: list[str] = json.loads(said)
            return told
        return []  # whatever has ended process 1, nothing has passed

    def output_of(self, runs: Sequence[dict[str, Any]], stops: bool) -> tuple[bytes, str]:
        """Return what process 1 says, or nothing if it takes too long, and what goes wrong."""
        names = ("timeout", "memory", "processes", "output")
        limits = {name: getattr(self, name) for name in names}
        job = {"runs": runs, "limits": limits, "stops": stops, "total_timeout": self.total_timeout}
        patience = self.total_timeout + PATIENCE
        with subprocess.Popen(
            command(self.disk),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},  # process 1 would show another
        ) as process:
            try:
                said, errors = process.communicate(json.dumps(job).encode(), patience)
            except subprocess.TimeoutExpired:
                return b"", f"nothing came within {patience:g} s"
            finally:
                process.kill()  # an interrupt leaves none behind
        return said, errors.decode(errors="replace").strip()


@cache
def check() -> None:
    """Make sure that programs can be run in a sandbox on this machine.

    Raises:
        ValueError: bubblewrap is missing, too old, or not allowed to make a sandbox.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise ValueError(
            "programs are run inside bubblewrap, and there is no `bwrap` on this machine: "
            f"{INSTALL}, version {'.'.join(map(str, OLDEST))} or newer; nothing runs without it"
        )
    says = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", says)[:2])
    if version < OLDEST:
        raise ValueError(
            f"bubblewrap {'.'.join(map(str, OLDEST))} or newer is needed, and {path} is "
            f"{quoted(says.strip()) or 'none'}: {INSTALL} from a newer release"
        )
    sandbox = Sandbox(60.0, 60.0, 1024 * MB, 16, MB, 16 * MB)
    run = {"program": "print(6 * 7)", "given": "", "expected": "42", "token": None}
    answer, errors = sandbox.output_of([run], True)
    if json.loads(answer or b"[]") != ["passed"]:
        raise ValueError(
            f"no sandbox can be made here: {quoted(errors or answer.decode())}; bubblewrap needs "
            "user namespaces (sysctl user.max_user_namespaces, or kernel.apparmor_restrict_"
            "unprivileged_userns, or a container that allows them), and root needs setpriv too "
            "(util-linux)"
        )


@lru_cache(maxsize=4)
def command(disk: int) -> tuple[str, ...]:
    """Return the command that starts a sandbox, in which all but /tmp and /dev/shm is read-only."""
    half = ("--size", str(max(disk // 2, 4096)), "--tmpfs")
    writable = ("--dev", "/dev", *half, "/dev/shm", *half, "/tmp")
    sealed = ("--ro-bind", str(INIT), "/init.py", "--remount-ro", "/dev", "--remount-ro", "/")
    start = ("--chdir", "/tmp", "--", sys.executable, "-I", "-S", "/init.py")
    own = (*ISOLATED, "--proc", "/proc", *writable, *_read_only(), *sealed, *start)
    return (*(_as_nobody() if os.geteuid() == 0 else ()), _bubblewrap(), *own)


def _bubblewrap() -> str:
    return shutil.which("bwrap") or "bwrap"


def _as_nobody() -> tuple[str, ...]:
    """Return what goes before a command that root must not run: the kernel does not count root's
    processes. What root alone may reach, as a Python below /root, is shown where others do.
    """
    see = ("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp")
    script = (*_folders(INIT), "--ro-bind", str(INIT), str(INIT))
    change = (
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CAP_SETUID",
        "--cap-add",
        "CAP_SETGID",
    )
    become = ("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--")
    return (_bubblewrap(), *see, *_read_only(), *script, *change, "--", *become)


def _read_only() -> tuple[str, ...]:
    """Return bubblewrap's options that show the system's programs, and Python with its packages."""
    options: list[str] = []
    for name in ("/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        else:
            options += ["--ro-bind-try", name, name]
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    shown = ["/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", *python]
    for name in dict.fromkeys(shown):
        if name == "/usr" or not name.startswith("/usr/"):
            options += [*_folders(Path(name)), "--ro-bind-try", name, name]
    return tuple(options)


def _folders(path: Path) -> list[str]:
    """Return bubblewrap's options that make the folders above a path, open to everybody."""
    above = list(path.parents)[-2::-1]
    return [option for folder in above for option in ("--dir", str(folder))]
