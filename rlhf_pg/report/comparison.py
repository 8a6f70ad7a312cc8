"""Several runs beside one another: their curves in one page, and what they differ in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.charts import Chart, charts_of
from rlhf_pg.report.html import VERSION, Table, write_document
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.run_page import curve_data, plain
from rlhf_pg.report.troubles import WINDOW, values

ABSENT = "-"
# Keys of a config that say where things are, not how the run learns.
PLACES = {
    *("output_dir", "resume_from_checkpoint", "run_name", "report_to", "logging_steps"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "save_steps", "save_total_limit"),
    *("num_completions_to_print", "log_completions_steps", "vllm_server_base_url", "ddp_timeout"),
    "vllm_sync_directory",
}


def write_comparison(directories: Sequence[Path], out: Path) -> Path:
    """Write the page that compares runs, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    runs = named_runs(directories)
    title = " | ".join(runs)
    write_document(out, title, comparison_data(runs))
    return out


def named_runs(directories: Sequence[Path]) -> dict[str, RunFiles]:
    """Return runs by names that differ: as much of the end of each path as that takes."""
    paths = [directory.absolute() for directory in directories]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{i + 1}: {path}" for i, path in enumerate(paths)]  # one run twice
    return {name: RunFiles(path) for name, path in zip(names, paths, strict=True)}


def comparison_data(runs: Mapping[str, RunFiles]) -> dict[str, Any]:
    """Return what the page shows: a chart for each number, a curve for each run."""
    curves = [curve_data(files) | {"name": visible(name)} for name, files in runs.items()]
    keys = list(dict.fromkeys(key for curve in curves for key in curve["metrics"]))
    return {
        "version": VERSION,
        "kind": "compare",
        "title": visible(" | ".join(runs)),
        "subtitle": [f"{len(runs)} runs"],
        "runs": curves,
        "charts": [asdict(one) for chart in charts_of(keys) for one in _single(chart)],
        "absent": [],
        "warnings": [],
        "tables": [table.shown() for table in difference_tables(runs)],
    }


def _single(chart: Chart) -> list[Chart]:
    """Return a chart for each of the numbers of a chart."""
    if len(chart.keys) == 1:
        return [chart]
    return [replace(chart, title=f"{chart.title}: {key}", keys=(key,)) for key in chart.keys]


def difference_tables(runs: Mapping[str, RunFiles]) -> list[Table]:
    """Return results, and the keys and versions in which runs differ."""
    return [_results(runs), _configs(runs), _versions(runs)]


def _results(runs: Mapping[str, RunFiles]) -> Table:
    lines = {name: files.metrics for name, files in runs.items()}
    facts: dict[str, Callable[[list[dict[str, Any]]], float | None]] = {
        "steps": lambda own: own[-1]["step"] if own else 0,
        "tokens": lambda own: _last(own, "num_tokens"),
        "seconds": lambda own: sum(value for _, value in values(own, "step_time")) or None,
        f"reward, mean of the last {WINDOW} steps": lambda own: _late(own, "reward"),
        "best held-out reward": lambda own: max(
            (value for _, value in values(own, "eval_reward")), default=None
        ),
        "last held-out reward": lambda own: _last(own, "eval_reward"),
    }
    rows = [
        [what, *(_spelled(fact(own)) for own in lines.values())] for what, fact in facts.items()
    ]
    rows = [row for row in rows if any(cell != ABSENT for cell in row[1:])]
    return Table(title="Results", head=["", *runs], rows=rows)


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    points = values(lines, key)
    return points[-1][1] if points else None


def _late(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    points = values(lines, key)[-WINDOW:]
    return fmean(value for _, value in points) if points else None


def _spelled(number: float | None) -> str:
    if number is None:
        return ABSENT
    return f"{number:,.0f}" if abs(number) >= 1000 or number == int(number) else f"{number:.4g}"


def _configs(runs: Mapping[str, RunFiles]) -> Table:
    """Return the keys whose values differ; those of places last."""
    rows = differing({name: files.config for name, files in runs.items()})
    of_places = [row for row in rows if row[0] in PLACES]
    others = [row for row in rows if row[0] not in PLACES]
    note = "" if rows else "Their configs have the same values."
    return Table(
        title="Config: what differs",
        head=["key", *runs],
        rows=[*others, *of_places],
        dimmed=len(of_places),
        note=note,
    )


def _versions(runs: Mapping[str, RunFiles]) -> Table:
    """Return what runs ran on where that differs."""
    on = {name: environment_of(files) for name, files in runs.items()}
    unknown = [name for name, own in on.items() if not own]
    rows = differing(on)
    note = f"Not known of {', '.join(unknown)}." if unknown else ""
    if not rows and not note:
        note = "The same packages, device and number of processes."
    return Table(title="Versions: what differs", head=["", *runs], rows=rows, note=note)


def environment_of(files: RunFiles) -> dict[str, Any]:
    """Return what a run ran on: processes, backend, device and versions."""
    if not files.starts:
        return {}
    start = files.starts[-1]
    own = {"processes": start.processes, "backend": start.backend, "device": start.device}
    return own | dict(start.versions)


def differing(by_run: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each key that has not the same value in all runs."""
    keys = list(dict.fromkeys(key for own in by_run.values() for key in own))
    rows = [
        [str(key), *(plain(own[key]) if key in own else ABSENT for own in by_run.values())]
        for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]
