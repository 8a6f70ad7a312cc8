"""`rlhf-pg replay` makes a step of a run again, as it was or with other keys."""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.help import usage_of
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import algorithm_of
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import fail, parse
from rlhf_pg.replay.again import Made, Replay, save
from rlhf_pg.replay.what_if import WhatIf, what_if
from rlhf_pg.replay.what_if_page import number, short, tables, write_page
from rlhf_pg.report.run_files import RunFiles, StepTokens
from rlhf_pg.rewards.named import PYTHON, named_rewards
from rlhf_pg.trainers import PolicyGradientTrainer

MOST_ROWS = 16  # of the table, unless rows are chosen
WHAT_IF = "what_if.html"
SHORTER = {"sampler_logprob": "logprob"}  # names of columns


def replay(flags: Sequence[str]) -> None:
    """Make steps of a run again, show them, and save them if it is asked for."""
    directory = Path(flags[0]) if flags and not flags[0].startswith("-") else None
    if directory is None:
        fail("replay needs a run: rlhf-pg replay RUN --step 137")
    options, keys = parser_of("replay", usage_of("replay")).parse_known_args(list(flags[1:]))
    run = check(directory, options, keys)
    again = Replay(rebuilt(run), run)
    if keys:
        _show_what_if(what_if(again, rebuilt(run, keys), options.step), options)
        return
    speaks = again.trainer.runtime.is_main
    made = []
    for one in again.steps(options.step, options.until or options.step):
        made.append(one)
        if speaks:
            show(one, options.rows)
    if speaks and options.save is not None:
        save(made, options.save)
        print(f"saved {quoted(str(options.save))}")


def _show_what_if(found: WhatIf, options: argparse.Namespace) -> None:
    console = Console()
    console.rule(f"step {found.step}, if it had been otherwise")
    for table in tables(found, options.rows):
        shown = Table(*table.head, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        page = write_page(found, options.save / WHAT_IF)
        print(f"saved {quoted(str(page))}")


def check(directory: Path, options: argparse.Namespace, keys: Sequence[str]) -> RunFiles:
    """Return the files of a run, or `fail` before anything is loaded."""
    run = RunFiles(directory)
    if not (directory / "config.yaml").is_file() or not run.metrics:
        fail(f"{quoted(str(directory))} is no directory of a run: it lacks config.yaml or steps")
    last = run.metrics[-1]["step"]
    for name in ("step", "until"):
        value = getattr(options, name)
        if value is not None and value > last:
            fail(f"--{name} {value}: the run took steps 1 to {last}")
    if keys and options.until is not None:
        fail("--until is for steps as they were: with other keys name one by --step")
    if options.until is not None and options.until < options.step:
        fail(f"--until {options.until} is before --step {options.step}")
    if options.save is not None and options.save.resolve() == directory.resolve():
        fail("--save: the run itself is not written to; name another directory")
    return run


def tokens_again(directory: Path, step: int) -> StepTokens | None:
    """Make a step of a run again, for its tokens; None, and a line, if it is not as it was."""
    run = RunFiles(directory)
    made = Replay(rebuilt(run), run).make(step)
    if made.differs:
        said = f"step {step} of {directory} is not as it was when it is made again"
        print(visible(f"{said} ({', '.join(made.differs)} differ): its tokens are not shown"))
        return None
    return made.record.tokens


def rebuilt(run: RunFiles, keys: Sequence[str] = ()) -> PolicyGradientTrainer:
    """Make the trainer of a run from its config.yaml, with other keys; `fail` if it cannot be.

    A reward that was given in Python and that no name finds is not called: its scores are recorded.
    """
    file = run.directory / "config.yaml"
    kind = TRAINERS[algorithm_of(file, TRAINERS)]
    args = parse(kind.config_type, ["--config", str(file), *keys], "rlhf-pg replay")
    how = "make its trainer in Python, and give it to rlhf_pg.replay.Replay"
    if args.given_in_python:
        fail(f"the run was given {', '.join(args.given_in_python)} in Python: {how}")
    if args.model_name_or_path is None:
        fail(f"the run was given its model in Python: {how}")
    if args.task is None and not args.dataset_name:
        fail(f"the run was given its data in Python: {how}")
    if not keys:  # as it was, wherever it is now
        args = dataclasses.replace(args, output_dir=str(run.directory))
    if not any(name.startswith(PYTHON) for name in args.reward_funcs):
        return kind(args=args)
    functions = [_function(name, args.reward_options) for name in args.reward_funcs]
    args = dataclasses.replace(args, reward_funcs=(), reward_options={})
    return kind(args=args, reward_funcs=functions)


def _function(name: str, options: Mapping[str, Any]) -> Any:
    if not name.startswith(PYTHON):
        return named_rewards([name], {k: v for k, v in options.items() if k == name})[0]

    def not_there(**_: Any) -> Any:
        raise ValueError(f"{quoted(name)} was given in Python, and is not there to be asked")

    not_there.__name__ = name.removeprefix(PYTHON)
    return not_there


# ------------------------------------------------------------------------------------------ show


def show(made: Made, rows: Sequence[int] | None) -> None:
    """Print a step: how it agrees with the record, its numbers, and its completions."""
    console, metrics = Console(), made.metrics
    agrees = "as it was recorded" if not made.differs else f"differs: {', '.join(made.differs)}"
    console.rule(f"step {made.step}: {agrees}")
    names = ("reward", "kl", "entropy", "loss", "grad_norm", "learning_rate")
    console.print("  ".join(f"{name} {number(metrics.get(name))}" for name in names))
    said = made.record.completions
    unknown = [row for row in rows or () if row >= len(said)]
    if unknown:
        fail(f"--rows {unknown[0]}: the step has rows 0 to {len(said) - 1}")
    chosen = list(range(min(MOST_ROWS, len(said)))) if rows is None else list(rows)
    console.print(_table(made, chosen))
    if len(chosen) < len(said) and rows is None:
        console.print(f"{len(said) - len(chosen)} more rows: --rows {len(chosen)} ..., or --save")
    for row in rows or ():
        console.print(_tokens(made, row))


def _table(made: Made, rows: Sequence[int]) -> Table:
    said = made.record.completions
    sources = list(made.record.trace.rewards)
    table = Table(box=None, pad_edge=False)
    for name in ("row", "prompt", "completion", *sources, "advantage", "ratio", "tokens"):
        table.add_column(name, overflow="fold")
    for row in rows:
        one = said[row]
        numbers = _of_row(made.record.tokens, row)
        ratio = numbers.get("log_ratio", [])
        known = [x for x in ratio if not math.isnan(x)]
        cells = [
            str(row),
            f"{one['prompt_index']}.{one['sample']} {short(one['prompt'])}",
            short(one["completion"]),
            *(number(one[f"rewards/{name}"]) for name in sources),
            number(one["advantage"]),
            number(math.exp(sum(known) / len(known)) if known else None),
            str(len(ratio)),
        ]
        table.add_row(*map(Text, cells))
    return table


def _tokens(made: Made, row: int) -> Table:
    """Return a table of the tokens of a row, with every number that is known."""
    tokens = made.record.tokens
    assert tokens is not None
    numbers = _of_row(tokens, row)
    start = int(tokens.lengths[:row].sum())
    numbers["ratio"] = [math.exp(x) for x in numbers.pop("log_ratio")]  # of NaN: NaN
    table = Table(title=f"row {row}", title_justify="left", box=None, pad_edge=False)
    for name in ("token", "id", "text", *(SHORTER.get(name, name) for name in numbers)):
        table.add_column(name, overflow="fold")  # a number that is cut off would be another one
    for i in range(int(tokens.lengths[row])):
        text = repr(tokens.texts[start + i])
        cells = [str(i), str(tokens.ids[start + i]), visible(text)]
        table.add_row(*map(Text, [*cells, *(number(x[i]) for x in numbers.values())]))
    return table


def _of_row(tokens: StepTokens | None, row: int) -> dict[str, list[float]]:
    """Return the numbers of the tokens of a row."""
    if tokens is None:
        return {}
    start = int(tokens.lengths[:row].sum())
    end = start + int(tokens.lengths[row])
    return {name: column[start:end].tolist() for name, column in tokens.numbers.items()}
