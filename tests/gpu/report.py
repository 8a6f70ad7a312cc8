"""What the checks have found: rows, a table for people, a JSON for docs/gpu.json."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "triton", "deepspeed", "bitsandbytes", "trl", "vllm")


@dataclass(frozen=True)
class Row:
    """One check.

    Args:
        figure: what was measured, as text, or what went wrong.
        value: the number in it, in the unit that `what` or `figure` names.
        passed: None where nothing was checked, and the figure says why.
    """

    group: str
    what: str
    figure: str
    value: float | None
    passed: bool | None
    seconds: float

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "FAILED", None: "-"}[self.passed]


def environment(device: str) -> dict[str, Any]:
    """Of this machine, without taking memory of its GPU, all of which the checks are to have."""
    gpus = _gpus() if device == "cuda" else [device]
    name, driver, memory = [*gpus[0].split(", "), "", ""][:3]
    return {
        "device": name,
        "gpus": len(gpus) if device == "cuda" else 0,
        "memory": memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": os.environ.get("RLHF_PG_COMMIT")
        or _said("git", "describe", "--always", "--dirty", "--abbrev=40"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _gpus() -> list[str]:
    """Name, version of the driver and memory of each; its name alone, where nobody tells more."""
    wanted = "--query-gpu=name,driver_version,memory.total"
    found = _said("nvidia-smi", wanted, "--format=csv,noheader").splitlines()
    return found or [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _said(*command: str) -> str:
    """What a program prints; nothing, if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: Path, where: dict[str, Any], rows: list[Row], seconds: float, done: bool) -> None:
    """The report so far: a machine that is taken away leaves what it has shown."""
    checks = [asdict(row) for row in rows]
    counts = {
        "passed": sum(row.passed is True for row in rows),
        "failed": sum(row.passed is False for row in rows),
        "not_checked": sum(row.passed is None for row in rows),
    }
    report = {**where, "done": done, "seconds": round(seconds, 1), **counts, "checks": checks}
    path.write_text(json.dumps(report, indent=1) + "\n")


def table(where: dict[str, Any], rows: list[Row]) -> Table:
    torch_version = where["versions"].get("torch")
    shown = Table(
        "group", "check", "figure", "s", "", title=f"{where['device']}, torch {torch_version}"
    )
    for row in rows:
        shown.add_row(row.group, row.what, row.figure, f"{row.seconds:.0f}", row.verdict)
    return shown
