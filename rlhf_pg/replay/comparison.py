"""Compare several runs: their curves in one page, and their differing settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.html import table, write_document
from rlhf_pg.report.run_files import PLACES, RunFiles
from rlhf_pg.report.run_page import charts_of, curve_data, plain
from rlhf_pg.report.troubles import WINDOW, values

ABSENT = "-"


def write_comparison(directories: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs, with a chart for each metric, and return its path."""
    runs = name_runs(directories)
    curves = [curve_data(files) | {"name": visible(name)} for name, files in runs.items()]
    charts = []
    for chart in charts_of(dict.fromkeys(key for curve in curves for key in curve["metrics"])):
        for key in chart["keys"]:
            title = chart["title"] if len(chart["keys"]) == 1 else f"{chart['title']}: {key}"
            charts.append(chart | {"title": title, "keys": [key]})
    data = {
        "kind": "compare",
        "title": visible(" | ".join(runs)),
        "subtitle": [f"{len(runs)} runs"],
        "runs": curves,
        "charts": charts,
        "absent": [],
        "warnings": [],
        "tables": difference_tables(runs),
    }
    write_document(out, " | ".join(runs), data)
    return out


def name_runs(directories: Sequence[Path]) -> dict[str, RunFiles]:
    """Return runs by unique names: as many last parts of each path as necessary."""
    paths = [directory.absolute() for directory in directories]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{i + 1}: {path}" for i, path in enumerate(paths)]  # the same run twice
    return {name: RunFiles(path) for name, path in zip(names, paths, strict=True)}


def difference_tables(runs: Mapping[str, RunFiles]) -> list[dict[str, Any]]:
    """Return results, and the keys and versions in which runs differ."""
    columns = [_results(files.metrics) for files in runs.values()]
    known = [key for key in columns[0] if any(column[key] is not None for column in columns)]
    results = [[key, *(_spell(column[key]) for column in columns)] for key in known]
    config = differing({name: files.config for name, files in runs.items()})
    config.sort(key=lambda row: row[0] in PLACES)
    versions = differing({name: environment_of(files) for name, files in runs.items()})
    unknown = [name for name, files in runs.items() if not files.starts]
    note = "" if versions else "The same packages, device and number of processes."
    return [
        table("Results", ["", *runs], results),
        table(
            "Config: what differs",
            ["key", *runs],
            config,
            sum(row[0] in PLACES for row in config),
            "" if config else "Their configs have the same values.",
        ),
        table(
            "Versions: what differs",
            ["", *runs],
            versions,
            note=f"Not known of {', '.join(unknown)}." if unknown else note,
        ),
    ]


def _results(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the steps and rewards of a run."""
    keys = ("step", "num_tokens", "step_time", "reward", "eval_reward")
    steps, tokens, seconds, rewards, held_out = (
        [value for _, value in values(lines, key)] for key in keys
    )
    return {
        "steps": steps[-1] if steps else 0,
        "tokens": tokens[-1] if tokens else None,
        "seconds": sum(seconds) or None,
        f"reward, mean of the last {WINDOW} steps": fmean(rewards[-WINDOW:]) if rewards else None,
        "best held-out reward": max(held_out, default=None),
        "last held-out reward": held_out[-1] if held_out else None,
    }


def _spell(number: float | None) -> str:
    if number is None:
        return ABSENT
    return f"{number:,.0f}" if abs(number) >= 1000 or number == int(number) else f"{number:.4g}"


def environment_of(files: RunFiles) -> dict[str, Any]:
    """Return the environment of a run: processes, backend, device and versions."""
    if not files.starts:
        return {}
    start = files.starts[-1]
    own = {"processes": start.processes, "backend": start.backend, "device": start.device}
    return own | dict(start.versions)


def differing(by_run: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each key whose value is not the same in all runs."""
    keys = dict.fromkeys(key for own in by_run.values() for key in own)
    rows = [
        [str(key), *(plain(own[key]) if key in own else ABSENT for own in by_run.values())]
        for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]
