"""`rlhf-pg report` and `rlhf-pg compare` show runs: in a page, and beside one another."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail, load
from rlhf_pg.report.comparison import difference_tables, named_runs, write_comparison
from rlhf_pg.report.html import Table
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.run_page import write_report

OF_A_RUN = ("config.yaml", "metrics.jsonl")


def report(flags: Sequence[str]) -> None:
    """Write the page of a run, and print where it is."""
    names, others = _split(flags)
    directory = _only(names, "report")
    options = parser_of("report").parse_args(others)
    out = None if options.out is None else Path(options.out)
    try:
        print(visible(str(write_report(directory, out))))
    except OSError as error:
        _unwritten(error, "report")


def compare(flags: Sequence[str]) -> None:
    """Write the page that compares runs, and print where it is and what they differ in."""
    names, others = _split(flags)
    if len(names) < 2:
        fail("compare needs two runs or more: rlhf-pg compare runs/a runs/b")
    directories = [run_directory(name) for name in names]
    options = parser_of("compare").parse_args(others)
    out = Path(options.out)
    try:
        write_comparison(directories, out)
    except OSError as error:
        _unwritten(error, "compare")
    console = Console()
    for table in difference_tables(named_runs(directories)):
        _print(table, console)
    print(visible(str(out)))


def run_directory(name: str) -> Path:
    """Return the directory of a run; `fail` if it is none."""
    directory = Path(name)
    if not directory.exists():
        fail(f"{quoted(name)} does not exist: name the output_dir of a run")
    if not any((directory / file).is_file() for file in OF_A_RUN):
        inside = {path.parent.name for file in OF_A_RUN for path in directory.glob(f"*/{file}")}
        hint = f"; in it are the runs {', '.join(map(quoted, sorted(inside)))}" if inside else ""
        files = " or ".join(OF_A_RUN)
        fail(f"{quoted(name)} is no directory of a run, which has {files}{hint}")
    if (directory / "config.yaml").is_file():
        load(directory / "config.yaml")  # or say what is wrong with it
        try:
            _ = RunFiles(directory).config  # libyaml refuses characters that the other reader takes
        except yaml.YAMLError as error:
            fail(f"{directory / 'config.yaml'}: not valid YAML: {error}")
    return directory


def _split(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the first option, and the rest."""
    first = next((i for i, flag in enumerate(flags) if flag.startswith("-")), len(flags))
    return list(flags[:first]), list(flags[first:])


def _only(names: Sequence[str], command: str) -> Path:
    if len(names) != 1:
        fail(f"{command} needs one run: rlhf-pg {command} OUTPUT_DIR")
    return run_directory(names[0])


def _unwritten(error: OSError, command: str) -> NoReturn:
    where = f"{error.filename}: " if error.filename else ""
    fail(f"{where}{error.strerror or error}: write it elsewhere with rlhf-pg {command} ... --out")


def _print(table: Table, console: Console) -> None:
    """Print a table of a page as text."""
    shown = table.shown()
    console.print(Text(f"\n{shown['title']}", style="bold"))
    if shown["note"]:
        console.print(Text(shown["note"]))
    if not shown["rows"]:
        return
    drawn = RichTable(box=None, pad_edge=False)
    for i, name in enumerate(shown["head"]):
        drawn.add_column(Text(name), overflow="fold", no_wrap=i == 0)
    bright = len(shown["rows"]) - shown["dimmed"]
    for i, row in enumerate(shown["rows"]):
        drawn.add_row(*map(Text, row), style="dim" if i >= bright else None)
    console.print(drawn)
