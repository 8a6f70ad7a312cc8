"""`report.html` of a run: its curves, known trouble in them, its tokens, and what it ran on."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pg.boundary.quoted import told, visible
from rlhf_pg.report.charts import NO_CURVES, charts_of
from rlhf_pg.report.html import VERSION, Table, write_document
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.token_steps import COLUMNS, LoggedSteps
from rlhf_pg.report.troubles import is_number, troubles

logger = logging.getLogger(__name__)

REPORT = "report.html"
MOST_POINTS = 4_000  # of a curve; beyond, neighbouring steps become their mean
FIRST = 3.0  # seconds of a run that have no page yet, which many a short one needs never
SHARE = 100  # a page that is kept up to date takes at most one part in so many of the time


def write_report(directory: Path, out: Path | None = None, running: bool = False) -> Path:
    """Write the report of a run, from its files alone, and return its path.

    What is missing, of a run that was killed or is an old one, is not shown.

    Args:
        running: the page reloads itself, as the run writes it again.
        out: by default `report.html` in the run's directory.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / REPORT if out is None else out
    files = RunFiles(directory)
    logged = LoggedSteps.of(files)
    steps, left_out = logged.chosen()
    data = run_data(files) | {
        "steps": [logged.summary(step) for step in steps],
        "columns": COLUMNS,
        "left_out": left_out,
        "running": running,
    }
    write_document(path, data["title"], data, ((step, logged.packed(step)) for step in steps))
    return path


class LiveReport:
    """The report of a run, kept up to date while it goes on, at 1 % of its time at most.

    A report that cannot be written is one warning, and the run goes on.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self.clock = directory, clock
        self._due = clock() + FIRST
        self._has_failed = False

    def update(self) -> None:
        """Write the report if that is due."""
        if self.clock() >= self._due:
            self.finish(running=True)

    def finish(self, running: bool = False) -> None:
        """Write the report, due or not."""
        begun = self.clock()
        try:
            write_report(self.directory, running=running)
        except Exception as error:  # a full disk, a damaged file: never the end of a run
            if not self._has_failed:
                logger.warning("%s is not up to date: %s", self.directory / REPORT, told(error))
            self._has_failed = True
        self._due = self.clock() + SHARE * (self.clock() - begun)


# ---------------------------------------------------------------------------------- the numbers


def run_data(files: RunFiles) -> dict[str, Any]:
    """Return what a page shows of a run beside its tokens."""
    lines = files.metrics
    curve = curve_data(files)
    title = files.directory.absolute().name
    return {
        "version": VERSION,
        "kind": "run",
        "title": visible(title),
        "subtitle": [visible(part) for part in subtitle(files)],
        "runs": [curve],
        "charts": [asdict(chart) for chart in charts_of(curve["metrics"])],
        "absent": sorted(_absent(lines)),
        "warnings": [asdict(trouble) for trouble in troubles(lines)],
        "tables": [table.shown() for table in run_tables(files)],
    }


def subtitle(files: RunFiles) -> list[str]:
    """Return what a run is, in a few words each: algorithm, model, steps, versions."""
    config, lines = files.config, files.metrics
    model = str(config.get("model_name_or_path") or "").rstrip("/")
    if Path(model).name == "final":  # of an earlier run
        model = str(Path(model).parent)
    last, planned = (lines[-1]["step"] if lines else 0), config.get("max_steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > last else ""
    said = [str(config.get("algorithm") or "").upper(), Path(model).name, f"{last}{of} steps"]
    if files.starts:
        start = files.starts[-1]
        said.append(f"{start.processes} x {start.device} ({start.backend})")
        shown = ("torch", "transformers", "rlhf_pg", "rlhf-pg")
        said += [f"{name} {start.versions[name]}" for name in shown if name in start.versions]
    return [part for part in said if part]


def curve_data(files: RunFiles) -> dict[str, Any]:
    """Return the numbers of a run in columns, over steps, tokens and seconds.

    Of more than `MOST_POINTS` steps, neighbours become their mean.
    """
    lines = files.metrics
    keys = list(dict.fromkeys(key for line in lines for key in line))
    columns = {key: np.array([_number(line.get(key)) for line in lines]) for key in keys}
    known = {key: column for key, column in columns.items() if not np.isnan(column).all()}
    x = {"step": known.get("step", np.zeros(0))}
    x["time"] = np.nancumsum(known.get("step_time", np.zeros(len(lines))))
    if "num_tokens" in known:  # a counter, which where it is missing is as before
        x["tokens"] = np.maximum.accumulate(np.nan_to_num(known["num_tokens"]))
    width = -(-len(lines) // MOST_POINTS) or 1
    ends = np.minimum(np.arange(width, len(lines) + width, width), len(lines)) - 1
    curves = {}
    for key in known.keys() - NO_CURVES:
        parts = np.append(known[key], [np.nan] * (-len(lines) % width)).reshape(-1, width)
        means = np.ma.masked_invalid(parts).mean(1).filled(np.nan)
        curves[key] = [None if np.isnan(mean) else float(f"{mean:.6g}") for mean in means]
    return {
        "name": visible(files.directory.absolute().name),
        "x": {name: column[ends].tolist() for name, column in x.items()},
        "metrics": {visible(key): curves[key] for key in keys if key in curves},
        "mean_of": width,
    }


def _number(value: Any) -> float:
    return float(value) if is_number(value) else np.nan


def _absent(lines: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the numbers that the run has a place for, but never computed."""
    known = {key for line in lines for key in line}
    return {visible(key) for key in known if all(line.get(key) is None for line in lines)}


def run_tables(files: RunFiles) -> list[Table]:
    """Return what the run ran on, and its config."""
    tables = []
    if files.starts:
        rows = [
            [str(start.step), str(start.processes), start.backend, start.device]
            for start in files.starts
        ]
        head = ["after step", "processes", "backend", "device"]
        tables.append(Table(title="Beginnings", head=head, rows=rows))
        versions = [[name, version] for name, version in files.starts[-1].versions.items()]
        tables.append(Table(title="Versions", head=["package", "version"], rows=versions))
    if files.config:
        rows = [[str(key), plain(value)] for key, value in files.config.items()]
        tables.append(Table(title="Config", head=["key", "value"], rows=rows))
    return tables


def plain(value: Any) -> str:
    """Return a value of a config as YAML would have it, in one line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
