"""`rlhf-pg diff`: the first difference between two runs."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.options import parser_of, usage_of
from rlhf_pg.cli.report import run_directory
from rlhf_pg.config.parse import fail
from rlhf_pg.replay.diff import Difference, diff_runs


def diff(flags: Sequence[str]) -> None:
    """Print the first difference between two runs; exit with status 1 if there is one."""
    names = [flag for flag in flags[:2] if not flag.startswith("-")]
    if len(names) < 2:
        fail(f"diff needs two runs: {usage_of('diff')}")
    options = parser_of("diff").parse_args(list(flags[2:]))
    a, b = map(run_directory, names)
    found = diff_runs(a, b, options.rtol)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, default=str))
    else:
        print(visible("\n".join(_lines(found, a, b))))
    if found:
        raise SystemExit(1)


def _lines(found: Difference, a: Path, b: Path) -> Iterator[str]:
    yield f"A: {a}\nB: {b}"
    for title, entries in (("config", found.config), ("versions", found.versions)):
        if entries:
            yield f"{title}:"
            yield from (f"  {key}: {one} | {other}" for key, (one, other) in entries.items())
    if found.step is None:
        yield f"no difference in {found.steps} steps"
    else:
        first = found.places[0].stage
        when = f"step {found.step}" if found.step else "before the first step"
        yield f"{when}: {first} differ first"
        for place in found.places:
            more = f" (and {place.rows - 1} more)" if place.rows > 1 else ""
            yield f"  {place.stage}: {place.what}: {place.a} | {place.b}{more}"
    for name, count in (("A", found.only_a), ("B", found.only_b)):
        if count:
            yield f"{count} steps only in {name}"
