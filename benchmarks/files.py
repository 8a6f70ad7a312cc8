"""Files of benchmarks: splits of data, and results of runs that can be made one by one."""

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CalledProcessError
from threading import Lock
from typing import Any

Row = dict[str, Any]


def split_groups(groups: Mapping[str, list[Row]], sizes: Mapping[str, int]) -> dict[str, list[Row]]:
    """Split rows into parts of about these sizes, and "train"; a group stays together."""
    order = sorted(groups)
    random.Random(0).shuffle(order)
    parts: dict[str, list[Row]] = {name: [] for name in [*sizes, "train"]}
    for key in order:
        name = next((name for name, size in sizes.items() if len(parts[name]) < size), "train")
        parts[name] += groups[key]
    return parts


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as lines of JSON, and print how many."""
    lines = [json.dumps(row) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    print(f"{file}: {len(lines)} rows")


def make_missing(
    file: Path,
    columns: tuple[str, ...],
    wanted: Iterable[tuple[Any, ...]],
    make: Callable[..., Row],
    jobs: int,
) -> None:
    """Add the results that a file of results lacks, some at a time; say which runs fail.

    Args:
        columns: those of a result that say of which run it is.
        wanted: their values, for each run.
        make: makes a run, by these values, with a command; returns its result.
    """
    lines = file.read_text().splitlines() if file.exists() else []
    known = {tuple(row[column] for column in columns) for row in map(json.loads, lines)}
    lock = Lock()

    def add(run: tuple[Any, ...]) -> None:
        try:
            result = make(*run)
        except CalledProcessError as error:
            print(f"{run} failed: {error}", file=sys.stderr)
            return
        with lock, file.open("a") as results:
            results.write(f"{json.dumps(result)}\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(add, [run for run in wanted if run not in known]))
