"""`rlhf-pg report`, `compare` and `diff` show runs: in a page, and beside one another."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail
from rlhf_pg.replay.diff import Difference, diff_runs
from rlhf_pg.report.comparison import difference_tables, named_runs, write_comparison
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.run_page import write_report

OF_A_RUN = ("config.yaml", "metrics.jsonl")


def report(flags: Sequence[str]) -> None:
    """Write the page of a run, and print where it is."""
    options = parser_of("report").parse_args(flags)
    directory = run_directory(options.run)
    print(visible(str(write_report(directory, options.out and Path(options.out)))))


def compare(flags: Sequence[str]) -> None:
    """Write the page that compares runs, and print where it is and what they differ in."""
    options = parser_of("compare").parse_args(flags)
    if len(options.runs) < 2:
        fail("compare needs two runs or more: rlhf-pg compare runs/a runs/b")
    directories = [run_directory(name) for name in options.runs]
    write_comparison(directories, Path(options.out))
    for shown in difference_tables(named_runs(directories)):
        if shown["rows"]:
            drawn = Table(box=None, pad_edge=False)
            for i, name in enumerate(shown["head"]):
                drawn.add_column(Text(name), overflow="fold", no_wrap=i == 0)
            bright = len(shown["rows"]) - shown["dimmed"]
            for i, row in enumerate(shown["rows"]):
                drawn.add_row(*map(Text, row), style="dim" if i >= bright else None)
            note = [Text(shown["note"])] * bool(shown["note"])
            Console().print(Text(f"\n{shown['title']}", "bold"), *note, drawn, sep="\n")
    print(visible(options.out))


def diff(flags: Sequence[str]) -> None:
    """Print the first difference between two runs; exit with status 1 if there is one."""
    options = parser_of("diff").parse_args(flags)
    a, b = map(run_directory, options.runs)
    found = diff_runs(a, b, options.rtol)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, default=str))
    else:
        print(visible("\n".join(_difference(found, a, b))))
    if found:
        raise SystemExit(1)


def run_directory(name: str) -> Path:
    """Return the directory of a run; `fail` if it is none."""
    directory = Path(name)
    if not directory.exists():
        fail(f"{quoted(name)} does not exist: name the output_dir of a run")
    if not any((directory / file).is_file() for file in OF_A_RUN):
        inside = {path.parent.name for file in OF_A_RUN for path in directory.glob(f"*/{file}")}
        hint = f"; in it are the runs {', '.join(map(quoted, sorted(inside)))}" if inside else ""
        fail(f"{quoted(name)} is no directory of a run, which has {' or '.join(OF_A_RUN)}{hint}")
    try:
        _ = RunFiles(directory).config
    except yaml.YAMLError as error:
        fail(f"{directory / 'config.yaml'}: not valid YAML: {error}")
    return directory


def _difference(found: Difference, a: Path, b: Path) -> Iterator[str]:
    yield f"A: {a}\nB: {b}"
    for title, entries in (("config", found.config), ("versions", found.versions)):
        if entries:
            yield f"{title}:"
            yield from (f"  {key}: {one} | {other}" for key, (one, other) in entries.items())
    if found.step is None:
        yield f"no difference in {found.steps} steps"
    for i, place in enumerate(found.places):
        if i == 0:
            when = f"step {found.step}" if found.step else "before the first step"
            yield f"{when}: {place.stage} differ first"
        more = f" (and {place.rows - 1} more)" if place.rows > 1 else ""
        yield f"  {place.stage}: {place.what}: {place.a} | {place.b}{more}"
    for name, count in (("A", found.only_a), ("B", found.only_b)):
        if count:
            yield f"{count} steps only in {name}"
