"""A run in a terminal: its latest numbers, their curves in a line each, its newest completions."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.run_page import subtitle
from rlhf_pg.report.troubles import WINDOW, troubles, values
from rlhf_pg.report.watch import has_ended

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH, NAMES = 40, 55  # characters of a curve, and of what stands in front of it
SHOWN = (
    *("reward", "eval_reward", "kl", "entropy", "completions/mean_length"),
    *("completions/clipped_ratio", "clip_ratio/region_mean", "frac_reward_zero_std", "grad_norm"),
    *("loss", "value_loss", "explained_variance", "learning_rate", "step_time"),
    "perf/tokens_per_second",
)
NEWEST, LONGEST = 4, 240  # completions, and characters of each


def watch_text(directory: Path, console: Console, seconds: float = 1.0) -> None:
    """Show a run until it has ended; where nobody sees it change, show it once."""
    if not console.is_terminal:
        console.print(screen(directory, console))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            over = has_ended(directory)
            live.update(screen(directory, console), refresh=True)
            if over:
                return
            time.sleep(seconds)


def screen(directory: Path, console: Console) -> RenderableType:
    """Return all that is shown of a run."""
    files = RunFiles(directory)
    bars = BARS if (console.encoding or "").lower().startswith("utf") else PLAIN_BARS
    state = "ended" if has_ended(directory) else "running"
    head = [directory.absolute().name, *subtitle(files), state]
    parts: list[RenderableType] = [Text(visible("  ".join(head)), style="bold")]
    found = [trouble for trouble in troubles(files.metrics) if trouble.until is None]
    parts += [
        Text(visible(f"! {one.title} since step {one.step} ({one.key})"), style="yellow")
        for one in found
    ]
    parts.append(_numbers(files.metrics, bars, max(8, min(WIDTH, console.width - NAMES))))
    parts += [_completion(record) for record in files.completions[-NEWEST:]]
    return Group(*parts)


def _numbers(lines: Sequence[Mapping[str, Any]], bars: str, width: int) -> RenderableType:
    """Return a table of the latest numbers."""
    if not lines:
        return Text("no step has been taken yet")
    table = Table(box=None, pad_edge=False)
    for name, side in (("", "left"), ("latest", "right"), (f"mean of {WINDOW}", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("over the steps", no_wrap=True)
    sources = [key for key in lines[-1] if key.startswith("rewards/") and key.endswith("/mean")]
    for key in (SHOWN[0], *sources, *SHOWN[1:]):
        numbers = [value for _, value in values(lines, key)]
        if numbers:
            late = fmean(numbers[-WINDOW:])
            cells = [key, f"{numbers[-1]:.4g}", f"{late:.4g}", sparkline(numbers, bars, width)]
            table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def sparkline(numbers: Sequence[float], bars: str = BARS, width: int = WIDTH) -> str:
    """Return a curve as a line of bars, each the mean of its share of the numbers."""
    width = min(width, len(numbers))
    edges = [round(i * len(numbers) / width) for i in range(width + 1)]
    means = [fmean(numbers[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if not high > low:
        return bars[0] * width
    return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


def _completion(record: Mapping[str, Any]) -> RenderableType:
    """Return a completion in a line or two, with its scores."""
    scores = " ".join(
        f"{value:.3g}"
        for key, value in record.items()
        if key.startswith("rewards/") and isinstance(value, int | float)
    )
    line = Text(visible(f"{record['step']}  [{scores}]  "), style="dim")
    line.append(_end_of(record.get("prompt")), style="dim")
    line.append(" -> ", style="dim")
    return line.append(_end_of(record.get("completion")), style="not dim")


def _end_of(turns: Any) -> str:
    """Return a text, or the last message of a chat, in one line, cut and escaped."""
    last = turns[-1] if isinstance(turns, list) and turns else turns
    text = last.get("content", "") if isinstance(last, dict) else last
    one_line = repr(text if isinstance(text, str) else str(text))  # which escapes what is not shown
    return one_line if len(one_line) <= LONGEST else f"{one_line[:LONGEST]} ..."
