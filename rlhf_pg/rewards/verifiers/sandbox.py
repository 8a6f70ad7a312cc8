"""A sandbox for programs that a model has written: bubblewrap, started anew for each of them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_pg.boundary.quoted import quoted

OLDEST = (0, 8)  # the first version that forbids user namespaces inside
INSTALL = "install it (apt install bubblewrap, dnf install bubblewrap)"
PATIENCE = 30.0  # seconds beyond its own limit after which a sandbox is killed from outside
MB = 1 << 20
NOBODY = "65534"
LONGEST = 100_000  # bytes of a program
OUTPUT = MB  # bytes of what it prints, and of any file
DISK = 64 * MB  # bytes of all files together
PROCESSES = 16  # and threads, at the same time
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
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# What a program complains of is not what a sandbox that does not start complains of.
QUIET = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")


@dataclass(frozen=True)
class Sandbox:
    """Limits within which a program runs, in an empty /tmp."""

    timeout: float  # seconds
    memory: int  # bytes of each process

    def run(self, program: str, given: str = "") -> tuple[str, str]:
        """Run a Python program on a standard input.

        Returns:
            How it ended ("exit 0", "out of time"), and its output.

        Raises:
            RuntimeError: there is no sandbox to be had, with what bubblewrap says.
        """
        source = program.encode(errors="replace")
        if b"\0" in source or len(source) > LONGEST:
            return "exit 1", ""
        limits = [f"--as={self.memory}", f"--fsize={OUTPUT}", "--nofile=64", "--core=0"]
        # Older kernels count what the user runs elsewhere too.
        if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14):
            limits.append(f"--nproc={PROCESSES + 2}")
        # As process 1 of its own namespace it cannot be killed from inside, and ends all others.
        watched = ("timeout", "--signal=KILL", str(self.timeout), "prlimit", *limits, *QUIET)
        ran = [*command(), *watched, sys.executable, "-P", "-s", "-c", source.decode()]
        start = time.monotonic()
        with tempfile.TemporaryFile() as output:  # whose size is limited, unlike that of a pipe
            ended = subprocess.run(
                ran,
                input=given.encode(errors="replace"),
                stdout=output,
                stderr=subprocess.PIPE,
                cwd="/",
                env=ENVIRONMENT,
                timeout=self.timeout + PATIENCE,
            )
            if ended.stderr:
                said = ended.stderr.decode(errors="replace").strip()
                raise RuntimeError(f"the sandbox does not start: {quoted(said)}")
            is_late = time.monotonic() - start >= self.timeout
            how = "out of time" if is_late and ended.returncode else f"exit {ended.returncode}"
            output.seek(0)
            return how, output.read().decode(errors="replace")


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
    if tuple(int(part) for part in re.findall(r"\d+", says)[:2]) < OLDEST:
        raise ValueError(
            f"bubblewrap {'.'.join(map(str, OLDEST))} or newer is needed, and {path} is "
            f"{quoted(says.strip()) or 'none'}: {INSTALL} from a newer release"
        )
    try:
        said = Sandbox(60.0, 1024 * MB).run("print(6 * 7)")
    except RuntimeError as error:
        said = (str(error), "")
    if said != ("exit 0", "42\n"):
        raise ValueError(
            f"no sandbox can be made here: {quoted(said[0])}; bubblewrap needs user namespaces "
            "(sysctl user.max_user_namespaces, or kernel.apparmor_restrict_unprivileged_userns, or "
            "a container that allows them), and root needs setpriv too (util-linux)"
        )


@cache
def command() -> tuple[str, ...]:
    """Return the command that starts a sandbox, in which all but /tmp and /dev/shm is read-only.

    The kernel does not count root's processes, so root becomes nobody first, inside a bubblewrap
    that shows what root alone may reach, as a Python below /root.
    """
    bwrap, shown = shutil.which("bwrap") or "bwrap", _read_only()
    half = ("--size", str(DISK // 2), "--tmpfs")
    writable = ("--proc", "/proc", "--dev", "/dev", *half, "/dev/shm", *half, "/tmp")
    sealed = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")
    own = (bwrap, *ISOLATED, *writable, *shown, *sealed)
    if os.geteuid() != 0:
        return own
    see = ("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp")
    caps = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    become = ("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--")
    return (bwrap, *see, *shown, "--die-with-parent", *caps, "--", *become, *own)


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
            for folder in list(Path(name).parents)[-2::-1]:  # open to everybody
                options += ["--dir", str(folder)]
            options += ["--ro-bind-try", name, name]
    return tuple(options)
