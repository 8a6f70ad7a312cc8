"""What a run leaves in metrics.jsonl, without what depends on the clock or the machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_pg.report.run_files import read

CLOCK = ("step_time", "time/", "perf/", "memory/")


def untimed(run: Path) -> list[dict[str, Any]]:
    """Of every step what was computed."""
    return [without_times(line) for line in read(run / "metrics.jsonl")]


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """One line of it."""
    return {key: value for key, value in line.items() if not key.startswith(CLOCK)}
