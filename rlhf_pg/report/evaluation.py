"""The metrics of an evaluation as tables, with their confidence intervals."""

import math
import re
from collections.abc import Mapping, Sequence

from rich.table import Column, Table

from rlhf_pg.boundary.terminal import literal

Z = 1.959964  # 97.5 % quantile of the normal distribution
# Metrics in the table; the JSON has all of them.
SHOWN = re.compile(
    r"reward|rewards/.*/(mean|pass@\d+)|(pass|best|majority)@\d+"
    r"|completions/(mean_length|clipped_ratio)|(episodes|tools)/.*"
)


def intervals(metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return 95 % confidence intervals: the mean -+ 1.96 standard errors over prompts."""
    errors = {name: metrics.get(f"{name}_stderr", math.nan) * Z for name in metrics}
    return {name: (metrics[name] - x, metrics[name] + x) for name, x in errors.items() if x == x}


def tables(
    metrics: Mapping[str, float],
    sets: Sequence[str],
    columns: Sequence[str] = ("sampled", "greedy"),
) -> list[Table]:
    """Return a table for each evaluation set (one without a name is ""), and for their mean;
    rewards that never reach the threshold have no row for pass@k.
    """
    heads = {name: f"eval_{name}{'_' * bool(name)}" for name in dict.fromkeys([*sets, ""])}
    known = intervals(metrics)
    rows: dict[str, dict[str, list[str]]] = {name: {} for name in heads}
    for metric, value in metrics.items():
        owner = max((name for name, head in heads.items() if metric.startswith(head)), key=len)
        full = metric.removeprefix(heads[owner])
        short = full.removeprefix("greedy_")
        if SHOWN.fullmatch(short) and (value or "/pass@" not in short):
            half = f" ± {known[metric][1] - value:.2g}" if metric in known else ""
            cell = "-" if math.isnan(value) else f"{value:.4g}{half}"
            rows[owner].setdefault(short, [""] * len(columns))[short != full] = cell
    made = []
    for name, own in rows.items():
        table = Table(Column(literal(name or ("evaluation" if "" in sets else "mean"))), *columns)
        for metric, cells in own.items():
            table.add_row(literal(metric), *cells)
        made += [table] * bool(own)
    return made
