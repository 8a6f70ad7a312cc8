"""`rlhf-pg report`, `compare` and `diff`: show one run in a page, or compare several."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.terminal import say
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail
from rlhf_pg.replay import comparison
from rlhf_pg.report.run_files import run_of
from rlhf_pg.report.run_page import write_report


def report(flags: Sequence[str]) -> None:
    """Write the page of a run, and print its path."""
    options = parser_of("report").parse_args(flags)
    directory = run_of(options.run).directory
    say(str(write_report(directory, options.out and Path(options.out))))


def compare(flags: Sequence[str]) -> None:
    """Write a page that compares runs, and print its path and the differing settings."""
    options = parser_of("compare").parse_args(flags)
    if len(options.runs) < 2:
        fail("compare needs two runs or more: rlhf-pg compare runs/a runs/b")
    directories = [run_of(name).directory for name in options.runs]
    comparison.write_comparison(directories, Path(options.out))
    for shown in comparison.difference_tables(comparison.name_runs(directories)):
        if shown["rows"]:
            drawn = Table(box=None, pad_edge=False)
            for i, name in enumerate(shown["head"]):
                drawn.add_column(Text(name), overflow="fold", no_wrap=i == 0)
            bright = len(shown["rows"]) - shown["dimmed"]
            for i, row in enumerate(shown["rows"]):
                drawn.add_row(
                    *map(Text, row),
                    style="dim" if i >= bright else None,
                )
            parts = [Text(f"\n{shown['title']}", "bold"), drawn]
            if shown["note"]:
                parts.insert(1, Text(shown["note"]))
            Console().print(*parts, sep="\n")
    say(options.out)


def diff(flags: Sequence[str]) -> None:
    """Print the first difference between two runs; exit with status 1 if there is one."""
    options = parser_of("diff").parse_args(flags)
    a, b = (run_of(name).directory for name in options.runs)
    difference = comparison.diff_runs(a, b, options.rtol)
    if options.json:
        print(
            json.dumps(
                dataclasses.asdict(difference),
                indent=2,
                default=str,
            )
        )
    else:
        say("\n".join(comparison.describe(difference, a, b)))
    if difference:
        raise SystemExit(1)
