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
    known = {}
    for name, mean in metrics.items():
        half = metrics.get(f"{name}_stderr", math.nan) * Z
        if not math.isnan(half):
            known[name] = (mean - half, mean + half)
    return known


def tables(
    metrics: Mapping[str, float],
    sets: Sequence[str],
    columns: Sequence[str] = ("sampled", "greedy"),
) -> list[Table]:
    """Return a table for each evaluation set (one without a name is ""), and for their mean;
    rewards that never reach the threshold have no row for pass@k.
    """
    heads = {name: f"eval_{name}_" if name else "eval_" for name in [*sets, ""]}
    known = intervals(metrics)
    rows: dict[str, dict[str, list[str]]] = {name: {} for name in heads}
    for metric, value in metrics.items():
        owner = max((name for name, head in heads.items() if metric.startswith(head)), key=len)
        full = metric.removeprefix(heads[owner])
        short = full.removeprefix("greedy_")
        if not SHOWN.fullmatch(short) or (value == 0 and "/pass@" in short):
            continue
        cell = "-"
        if not math.isnan(value):
            cell = f"{value:.4g}"
            if metric in known:
                cell += f" ± {known[metric][1] - value:.2g}"
        cells = rows[owner].setdefault(short, [""] * len(columns))
        is_greedy = short != full
        cells[is_greedy] = cell
    made = []
    for name, cells_of in rows.items():
        if not cells_of:
            continue
        title = name or ("evaluation" if "" in sets else "mean")
        table = Table(Column(literal(title)), *columns)
        for metric, cells in cells_of.items():
            table.add_row(literal(metric), *cells)
        made.append(table)
    return made
