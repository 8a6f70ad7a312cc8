"""`rlhf-pg diff`: where two runs part."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.help import usage_of
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail
from rlhf_pg.replay.difference import Comparison, Difference, diff_runs
from rlhf_pg.replay.pair import Remake


def diff(flags: Sequence[str]) -> None:
    """Print the first difference between two runs; exit with status 1 if there is one."""
    (a, b), options = _split("diff", ("RUN_A", "RUN_B"), flags)
    compared = diff_runs(a, b, options.rtol, _remake(options))
    if options.json:
        print(json.dumps(compared.as_json(), indent=2, default=str))
    else:
        print(visible("\n".join(_lines(compared))))
    if compared.difference is not None:
        raise SystemExit(1)


def _remake(options: Namespace) -> Remake | None:
    """Return what makes a step again, if it is asked for."""
    if not options.replay:
        return None
    from rlhf_pg.cli.replay import tokens_again  # it needs seconds to import

    return tokens_again


def _split(
    command: str, wanted: tuple[str, ...], flags: Sequence[str]
) -> tuple[list[Path], Namespace]:
    """Return the directories that a command begins with, and its options; or `fail`."""
    names = [flag for flag in flags[: len(wanted)] if not flag.startswith("-")]
    if len(names) < len(wanted):
        fail(f"{command} needs {' and '.join(wanted)}: {usage_of(command)}")
    for name in names:
        if not Path(name).is_dir():
            fail(f"{quoted(name)} is no directory: name what a run had as output_dir")
    options = parser_of(command, usage_of(command)).parse_args(list(flags[len(wanted) :]))
    return [Path(name) for name in names], options


def _lines(compared: Comparison) -> Iterator[str]:
    one = compared.difference
    if one is None:
        yield f"no difference in {compared.steps} steps"
    else:
        yield f"step {one.step}: {one.cause}"
        yield from (f"  {line}" for line in one.because)
        yield from _found(one)
    yield f"A: {compared.a}"
    yield f"B: {compared.b}"
    yield f"{compared.steps} steps in both, {compared.rounding}"
    if compared.also:
        word = "also told differently" if one is not None else "told differently"
        yield f"{word}, and not the cause: {'; '.join(compared.also)}"
    yield from compared.not_compared


def _found(one: Difference) -> Iterator[str]:
    """Yield the first place, and some of the others of its kind."""
    if not one.found:
        return
    when = "before the first step" if one.step == 0 else f"in step {one.step}"
    yield f"first seen {when}, in {one.found[0].stage}:"
    kinds = one.shown()
    yield from (f"  {finding}" for finding in kinds)
    if len(one.found) > len(kinds):
        yield f"  and {len(one.found) - len(kinds)} more"
    if one.persists is False:
        yield f"  step {one.step + 1} is equal again: a file may have been changed after the run"
