"""`rlhf-pg diff` and `rlhf-pg bisect`: where two runs part, and where one goes wrong."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown, visible
from rlhf_pg.cli.help import usage_of
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail
from rlhf_pg.replay.batch import Entry, batch_of
from rlhf_pg.replay.condition import Term, first_step, parse
from rlhf_pg.replay.difference import Comparison, Difference, diff_runs
from rlhf_pg.replay.finding import value
from rlhf_pg.replay.pair import Remake, opened
from rlhf_pg.report.run_files import METRICS, TRACE

NEIGHBOURS = 2  # steps that are shown before and after the one that is found


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


def bisect(flags: Sequence[str]) -> None:
    """Print the first step at which a condition holds; exit with status 1 if there is none."""
    (directory,), options = _split("bisect", ("RUN",), flags)
    if options.bad is None:
        fail('bisect needs a condition: rlhf-pg bisect RUN --bad "reward < 0.2"')
    run = opened(directory)
    lines = run.metrics
    if not lines:
        fail(f"{directory / METRICS} has no steps: name the directory of a run that took some")
    condition = parse(options.bad)
    found = first_step(condition, lines)
    if found is None:
        print(f"no step of {len(lines)} has {quoted(options.bad)}")
        raise SystemExit(1)
    place, terms = found
    step = lines[place]["step"]
    print(f"step {step}: {', '.join(_met(term, lines[place]) for term in terms)}")
    print("\n".join(_neighbours(lines, place, condition.names)))
    print(visible("\n".join(_batch(batch_of(run, step, _remake(options)), directory, step))))


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


def _met(term: Term, line: Mapping[str, Any]) -> str:
    """Return a comparison that holds, with the value that it holds for."""
    number = "null" if term.number is None else f"{term.number:g}"
    return f"{quoted(term.name)} {_short(line[term.name])} {term.operator} {number}"


def _neighbours(
    lines: Sequence[Mapping[str, Any]], place: int, names: Sequence[str]
) -> Iterator[str]:
    for i in range(max(0, place - NEIGHBOURS), min(len(lines), place + NEIGHBOURS + 1)):
        numbers = "  ".join(f"{quoted(name)} {_short(lines[i].get(name))}" for name in names)
        yield f"{'>' if i == place else ' '} step {lines[i]['step']}  {numbers}"


def _batch(entries: Sequence[Entry], directory: Path, step: int) -> Iterator[str]:
    """Yield the completions of a step, or what to do to see them."""
    if entries:
        yield f"its batch, {len(entries)} completions:"
    for entry in entries:
        scores = [f"{quoted(name)} {_short(score)}" for name, score in entry.rewards.items()]
        if entry.advantage is not None:
            scores.append(f"advantage {_short(entry.advantage)}")
        yield f"  {entry.row}: {', '.join(scores) or 'no scores are kept'}"
        if entry.completion is not None:
            prompt = "" if entry.prompt is None else f"{shown(entry.prompt)} -> "
            yield f"    {prompt}{shown(entry.completion)}"
    if not entries:
        yield f"nothing is kept of its batch: the run has no {TRACE} and logged no completions"
    if not entries or any(entry.completion is None for entry in entries):
        yield f"to see its tokens: rlhf-pg replay {quoted(str(directory))} --step {step}"


def _short(number: Any) -> str:
    if number is None:
        return "null"
    return f"{number:.4g}" if isinstance(number, float) else value(number)
