"""What CPU tests cannot see: the same numbers on a GPU, memory, kernels that are compiled, the
recipes in bfloat16 and with adapters, the backends with NCCL, and times.

Every group runs in a process of its own (`tests/gpu/group.py`), which may fail, hang or be killed:
the rows that it had are kept, and its next check is made in another process.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.gpu import report
from tests.gpu.check import SHORT, Group
from tests.gpu.groups import GROUPS
from tests.gpu.report import ROOT, Row

POLL = 0.1
STARTING = 120.0  # seconds, also between two checks


@dataclass(frozen=True)
class Job:
    """A group that is to run.

    Args:
        until: by `time.monotonic`, when it has to end.
        logs: directory of what its processes print.
        module: that has the group.
    """

    name: str
    group: Group
    device: str
    until: float
    logs: Path
    module: str = "tests.gpu.groups"
    pattern: str = ""  # of the names of checks

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"


@dataclass
class Heard:
    """What one process of a group has told."""

    begun: int = 0
    running: str | None = None
    since: float = field(default_factory=time.monotonic)  # of the check, or of what is between two
    done: bool = False

    def hear(self, event: dict[str, Any]) -> Row | None:
        """Take note of an event; returns the row, if it is one."""
        self.since = time.monotonic()
        if "begins" in event:
            self.begun, self.running = self.begun + 1, event["begins"]
        self.done = self.done or event.get("done", False)
        if "row" not in event:
            return None
        self.running = None
        return Row(**event["row"])


def run(job: Job) -> Iterator[Row]:
    """The rows of a group as they come, by as many processes as it takes."""
    first = 0
    while True:
        heard = Heard()
        why = yield from _attend(job, first, heard)
        if heard.done:
            return
        late = time.monotonic() >= job.until
        if heard.running is not None or not heard.begun:
            what, seconds = heard.running or "starting", round(time.monotonic() - heard.since, 2)
            yield Row(job.name, what, why, None, None if late else False, seconds)
        if late:
            yield Row(job.name, "what comes after", "no time left for it", None, None, 0.0)
        if late or not heard.begun:
            return
        first += heard.begun


def _attend(job: Job, first: int, heard: Heard) -> Iterator[Row]:
    """Rows of one process until it ends or is ended; returns why it did."""
    with tempfile.NamedTemporaryFile("r") as lines, job.log.open("a") as output:
        process = _start(job, first, lines.name, output)
        try:
            while True:
                why = _reason(process, job, heard)
                for line in lines:
                    if (row := heard.hear(json.loads(line))) is not None:
                        yield row
                if why is not None:
                    return why
                time.sleep(POLL)
        finally:
            _end(process)


def _reason(process: subprocess.Popen[bytes], job: Job, heard: Heard) -> str | None:
    """Why there is nothing more to wait for, if so."""
    code, now = process.poll(), time.monotonic()
    if code is not None:
        by = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended by {by}, see {job.log}"
    if now >= job.until:
        return "stopped: no time left"
    limit = job.group.limit if heard.running is not None else STARTING
    return f"stopped after {limit:.0f} s, see {job.log}" if now - heard.since > limit else None


def _start(job: Job, first: int, lines: str, output: Any) -> subprocess.Popen[bytes]:
    """A group's process, at the head of a session, so that all it starts can be ended with it."""
    command = [sys.executable, "-m", "tests.gpu.group", job.module, job.name]
    command += ["--device", job.device, "--first", str(first), "--lines", lines]
    command += ["--check", job.pattern]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {})
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it has left running."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--check", default="", metavar="PATTERN", help="a regular expression")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which it ends")
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"))
    return parser.parse_args()


def main() -> None:
    flags, console = parsed(), Console(width=120)
    if flags.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing checked")
        return
    if flags.minutes < 20:
        os.environ[SHORT] = "1"
    start, rows = time.monotonic(), list[Row]()
    where, logs = report.environment(flags.device), Path(tempfile.mkdtemp(prefix="gpu-checks-"))
    console.print(f"{where['device']}; what the checks print is in {logs}")
    report.write(flags.json, where, rows, 0.0, done=False)  # or say at once that it cannot be
    for name in flags.only:
        group, now = GROUPS[name], time.monotonic()
        until = min(start + 60 * flags.minutes, now + 60 * group.minutes)
        job = Job(name, group, flags.device, until, logs, pattern=flags.check)
        for row in run(job):
            rows.append(row)
            line = f"{row.group}: {row.what}: {row.figure} [{row.verdict}]"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            report.write(flags.json, where, rows, time.monotonic() - start, done=False)
    seconds, failed = time.monotonic() - start, sum(row.passed is False for row in rows)
    report.write(flags.json, where, rows, seconds, done=True)
    console.print(report.table(where, rows))
    console.print(f"{seconds:.0f} s, {failed} failed; report: {flags.json}")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
