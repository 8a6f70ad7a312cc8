"""From the curves of runs to a table and pictures."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = {"ours": "tab:blue", "trl": "tab:orange"}
STYLES = {"grpo": "-", "rloo": "--"}


class Point(NamedTuple):
    """One evaluation."""

    samples: float
    seconds: float
    score: float


class Run(NamedTuple):
    """Who ran, and the evaluations."""

    task: str
    method: str
    side: str
    curve: list[Point]

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]]) -> "Run":
        """Take the evaluations from the lines of a run's file, which begins with its settings."""
        job, *seen = lines
        points = [Point(**line) for line in seen if line.keys() == set(Point._fields)]
        return cls(job["task"], job["method"], job["side"], points)


class Spread(NamedTuple):
    """The median of some numbers, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> "Spread":
        known = list(numbers)
        return cls(statistics.median(known), min(known), max(known))

    def show(self, digits: str) -> str:
        return f"{self.median:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def to_score(curve: Sequence[Point], score: float) -> Point:
    """The first evaluation that reaches the score; infinitely far off if none does."""
    reached = (point for point in curve if point.score >= score)
    return next(reached, Point(math.inf, math.inf, math.nan))


def table(runs: Sequence[Run], scores: dict[str, float]) -> str:
    """A row for each task, method and side.

    Args:
        scores: by task, the score to reach.
    """
    rows = ["| task, method, side | runs | score | samples to it | seconds to it | last score |"]
    rows += ["|---" * 6 + "|"]
    for (task, method, side), curves in grouped(runs).items():
        reached = [to_score(curve, scores[task]) for curve in curves]
        samples = Spread.of(point.samples for point in reached).show(".0f")
        seconds = Spread.of(point.seconds for point in reached).show(".0f")
        last = Spread.of(curve[-1].score for curve in curves).show(".3f")
        who = f"{task}, {method}, {side}"
        cells = [who, str(len(curves)), f"{scores[task]:.2f}", samples, seconds, last]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[list[Point]]]:
    """The curves by task, method and side, in alphabetical order."""
    groups = defaultdict(list)
    for run in sorted(runs):
        groups[run[:3]].append(run.curve)
    return dict(groups)


def middle(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The medians of equally many evaluations, of the seconds and of the scores."""
    return [
        Point(*map(statistics.median, zip(*points, strict=True)))
        for points in zip(*curves, strict=True)
    ]


def save_picture(runs: Sequence[Run], scores: dict[str, float], path: Path) -> None:
    """Draw the score over seconds and samples, medians over thin single runs, a row per task."""
    from matplotlib.figure import Figure

    tasks = sorted({run.task for run in runs})
    figure = Figure(figsize=(9, 3.4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, sharey="row", squeeze=False)
    for (task, method, side), curves in grouped(runs).items():
        look = {"color": COLOURS[side], "linestyle": STYLES[method]}
        row = panels[tasks.index(task)]
        for axes, unit in zip(row, ("seconds", "samples"), strict=True):
            for curve in curves:
                axes.plot(*_columns(curve, unit), alpha=0.25, linewidth=0.8, **look)
            axes.plot(*_columns(middle(curves), unit), label=f"{method}, {side}", **look)
    for task, row in zip(tasks, panels, strict=True):
        row[0].set_ylabel(f"{task}, held out")
        row[1].legend(loc="lower right")
        for axes, unit in zip(row, ("seconds of training", "samples"), strict=True):
            axes.axhline(scores[task], color="grey", linewidth=0.8)
            axes.set_xlabel(unit)
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _columns(curve: Sequence[Point], unit: str) -> tuple[list[float], list[float]]:
    return [getattr(point, unit) for point in curve], [point.score for point in curve]
