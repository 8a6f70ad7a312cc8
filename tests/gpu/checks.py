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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.gpu import report
from tests.gpu.groups import GROUPS
from tests.gpu.report import ROOT, Row

LIMIT = 300.0  # seconds for one check
POLL = 0.1


@dataclass
class Attended:
    """What one process of a group has told."""

    begun: int = 0
    running: str | None = None
    since: float = 0.0  # when it began, or the process
    done: bool = False

    def hear(self, event: dict[str, Any]) -> Row | None:
        """Take note of an event; returns the row, if it is one."""
        if "begins" in event:
            self.begun, self.running, self.since = self.begun + 1, event["begins"], time.monotonic()
        self.done = self.done or event.get("done", False)
        if "row" not in event:
            return None
        self.running, self.since = None, time.monotonic()
        return Row(**event["row"])


def run_group(
    name: str, device: str, until: float, logs: Path, limit: float = LIMIT
) -> Iterator[Row]:
    """The rows of a group as they come, by as many processes as it takes.

    Args:
        until: by `time.monotonic`, when the group has to end.
        limit: seconds for one check.
    """
    first = 0
    while True:
        told = Attended(since=time.monotonic())
        why = yield from _attend(name, device, first, until, logs, limit, told)
        first += told.begun
        if told.done:
            return
        seconds = round(time.monotonic() - told.since, 2)
        late = time.monotonic() >= until
        if told.running is not None or not told.begun:
            what = told.running or "starting a process"
            yield Row(name, what, why, None, None if late else False, seconds)
        if late:
            yield Row(name, "what comes after", "no time left for it", None, None, 0.0)
        if late or not told.begun:
            return


def _attend(
    name: str, device: str, first: int, until: float, logs: Path, limit: float, told: Attended
) -> Iterator[Row]:
    """Rows of one process until it ends or is ended; returns why it did."""
    log = logs / f"{name}.log"
    with tempfile.NamedTemporaryFile("r") as lines, log.open("a") as output:
        process = _start(name, device, first, lines.name, output)
        why = None
        try:
            while why is None:
                ended = process.poll() is not None
                for line in lines:
                    if (row := told.hear(json.loads(line))) is not None:
                        yield row
                now = time.monotonic()
                if ended:
                    why = f"its process ended by {_by(process.returncode)}, see {log}"
                elif now >= until:
                    why = "stopped: no time left"
                elif now - told.since > limit:
                    why = f"stopped after {limit:.0f} s, see {log}"
                else:
                    time.sleep(POLL)
        finally:
            _end(process)
    return why


def _start(name: str, device: str, first: int, lines: str, output: Any) -> subprocess.Popen[bytes]:
    """A group's process, at the head of a session of its own so that all it starts ends with it."""
    command = [sys.executable, "-m", "tests.gpu.group", name, "--device", device]
    command += ["--first", str(first), "--lines", lines]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it has left running."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _by(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which it ends")
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"))
    return parser.parse_args()


def main() -> None:
    flags, console = parsed(), Console(width=120)
    if flags.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing checked")
        return
    start, rows = time.monotonic(), list[Row]()
    where, logs = report.environment(flags.device), Path(tempfile.mkdtemp(prefix="gpu-checks-"))
    console.print(f"{where['device']}; what the checks say goes to {logs}")

    def save(done: bool) -> None:
        report.write(flags.json, where, rows, time.monotonic() - start, done)

    for name in flags.only:
        now = time.monotonic()
        until = min(start + 60 * flags.minutes, now + 60 * GROUPS[name].minutes)
        for row in run_group(name, flags.device, until, logs):
            rows.append(row)
            line = f"{row.group}: {row.what}: {row.figure} [{row.verdict}]"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            save(done=False)
    save(done=True)
    console.print(report.table(where, rows))
    failed = sum(row.passed is False for row in rows)
    console.print(f"{time.monotonic() - start:.0f} s, {failed} failed; report: {flags.json}")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
