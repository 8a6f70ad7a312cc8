"""`rlhf-pg report` and `rlhf-pg compare` show runs: in a page, and beside one another."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail, load
from rlhf_pg.report.comparison import difference_tables, named_runs, write_comparison
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.run_page import write_report

OF_A_RUN = ("config.yaml", "metrics.jsonl")


def report(flags: Sequence[str]) -> None:
    """Write the page of a run, and print where it is."""
    names, out = _read("report", flags)
    if len(names) != 1:
        fail("report needs one run: rlhf-pg report OUTPUT_DIR")
    directory = run_directory(names[0])
    try:
        print(visible(str(write_report(directory, Path(out) if out else None))))
    except OSError as error:
        fail(f"{error}: write it elsewhere with rlhf-pg report ... --out")


def compare(flags: Sequence[str]) -> None:
    """Write the page that compares runs, and print where it is and what they differ in."""
    names, out = _read("compare", flags)
    if len(names) < 2:
        fail("compare needs two runs or more: rlhf-pg compare runs/a runs/b")
    directories = [run_directory(name) for name in names]
    try:
        write_comparison(directories, Path(out))
    except OSError as error:
        fail(f"{error}: write it elsewhere with rlhf-pg compare ... --out")
    console = Console()
    for shown in (table.shown() for table in difference_tables(named_runs(directories))):
        if not shown["rows"]:
            continue
        console.print(Text(f"\n{shown['title']}", style="bold"))
        if shown["note"]:
            console.print(Text(shown["note"]))
        drawn = Table(box=None, pad_edge=False)
        for i, name in enumerate(shown["head"]):
            drawn.add_column(Text(name), overflow="fold", no_wrap=i == 0)
        bright = len(shown["rows"]) - shown["dimmed"]
        for i, row in enumerate(shown["rows"]):
            drawn.add_row(*map(Text, row), style="dim" if i >= bright else None)
        console.print(drawn)
    print(visible(out))


def run_directory(name: str) -> Path:
    """Return the directory of a run; `fail` if it is none."""
    directory = Path(name)
    if not directory.exists():
        fail(f"{quoted(name)} does not exist: name the output_dir of a run")
    if not any((directory / file).is_file() for file in OF_A_RUN):
        inside = {path.parent.name for file in OF_A_RUN for path in directory.glob(f"*/{file}")}
        hint = f"; in it are the runs {', '.join(map(quoted, sorted(inside)))}" if inside else ""
        fail(f"{quoted(name)} is no directory of a run, which has {' or '.join(OF_A_RUN)}{hint}")
    if (directory / "config.yaml").is_file():
        load(directory / "config.yaml")  # or say what is wrong with it
        try:
            _ = RunFiles(directory).config  # libyaml refuses characters that the other reader takes
        except yaml.YAMLError as error:
            fail(f"{directory / 'config.yaml'}: not valid YAML: {error}")
    return directory


def _read(command: str, flags: Sequence[str]) -> tuple[list[str], str]:
    """Return what stands before the first option, and `--out`."""
    first = next((i for i, flag in enumerate(flags) if flag.startswith("-")), len(flags))
    return list(flags[:first]), parser_of(command).parse_args(list(flags[first:])).out
