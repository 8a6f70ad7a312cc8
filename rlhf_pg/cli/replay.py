"""`rlhf-pg replay` re-runs a step of a run, or shows it under other keys."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import config_of
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import fail
from rlhf_pg.data.chat import text_of
from rlhf_pg.replay.replay import Made, Replay
from rlhf_pg.replay.what_if import WhatIf, mean_advantages, what_if
from rlhf_pg.report.run_files import RunFiles, StepTokens
from rlhf_pg.rewards.named import PYTHON, named_rewards
from rlhf_pg.trainers import PolicyGradientTrainer

MOST_ROWS, MOST_TENSORS = 16, 5  # of tables, unless rows are chosen
METRICS = ("reward", "loss", "kl", "entropy", "grad_norm", "learning_rate", "value_loss")


def replay(flags: Sequence[str]) -> None:
    """Make a step of a run again and show it, as it was or with other keys."""
    options, keys = parser_of("replay").parse_known_args(flags)
    run = RunFiles(Path(options.run))
    if not (run.directory / "config.yaml").is_file() or not run.metrics:
        fail(f"{quoted(options.run)} holds no run: it lacks config.yaml or steps")
    if keys and options.resample:
        fail("--resample is for a step as it was: leave it out, or the other keys")
    again = Replay(rebuild(run), run)
    if keys:
        _show_what_if(what_if(again, rebuild(run, keys), options.step), options.rows)
        return
    made = again.make(options.step, options.resample)
    if again.trainer.runtime.is_main:
        _show(made, options.rows)


def rebuild(run: RunFiles, keys: Sequence[str] = ()) -> PolicyGradientTrainer:
    """Make the trainer of a run from its config.yaml, with other keys; `fail` if it cannot be.

    A reward that was given in Python and that no name finds is not called: its scores are recorded.
    """
    file = run.directory / "config.yaml"
    args = config_of(file, keys, "replay")
    kind = TRAINERS[args.algorithm]
    how = "make its trainer in Python, and give it to rlhf_pg.replay.replay.Replay"
    given = list(args.given_in_python)
    given += ["its model"] * (args.model_name_or_path is None)
    given += ["its data"] * (args.task is None and not args.dataset_name)
    if given:
        fail(f"the run was given {', '.join(given)} in Python: {how}")
    if not keys:  # as it was, wherever it is now
        args = dataclasses.replace(args, output_dir=str(run.directory))
    if not any(name.startswith(PYTHON) for name in args.reward_funcs):
        return kind(args=args)
    functions: list[Any] = []
    for name in args.reward_funcs:
        own = {key: value for key, value in args.reward_options.items() if key == name}
        functions += [_missing(name)] if name.startswith(PYTHON) else named_rewards([name], own)
    args = dataclasses.replace(args, reward_funcs=(), reward_options={})
    return kind(args=args, reward_funcs=functions)


def _missing(name: str) -> Any:
    def missing(**_: Any) -> Any:
        raise ValueError(f"{quoted(name)} was given in Python, and is not there to be asked")

    missing.__name__ = name.removeprefix(PYTHON)
    return missing


def _show(made: Made, rows: Sequence[int] | None) -> None:
    """Print a step: how it agrees with the record, its numbers, and its completions."""
    console, record, tokens = Console(), made.record, made.record.tokens
    assert tokens is not None
    stages = ", ".join(place.stage for place in made.differs)
    console.rule(f"step {made.step}: {f'differs: {stages}' if stages else 'as it was recorded'}")
    for place in made.differs:
        console.print(Text(visible(f"{place.what}: {place.a} | {place.b} ({place.rows} differ)")))
    names = [name for name in METRICS if name in made.metrics]
    console.print("  ".join(f"{name} {_number(made.metrics[name])}" for name in names))
    _check_rows(rows, len(tokens.lengths))
    chosen = range(min(MOST_ROWS, len(tokens.lengths))) if rows is None else rows
    sources = record.trace["sources"]
    head = ["row", "prompt", "completion", *sources, "advantage", "tokens"]
    lines = []
    for i in chosen:
        said = record.completions[i]
        scores = [_number(said[f"rewards/{name}"]) for name in sources]
        prompt = f"{said['prompt_index']}.{said['sample']} {_short(said['prompt'])}"
        row = [str(i), prompt, _short(said["completion"]), *scores, _number(said["advantage"])]
        lines.append([*row, str(tokens.lengths[i])])
    console.print(_table("completions", head, lines))
    if len(chosen) < len(tokens.lengths) and rows is None:
        console.print(f"{len(tokens.lengths) - len(chosen)} more rows: --rows {len(chosen)} ...")
    for i in rows or ():
        console.print(_tokens(tokens, i))


def _tokens(tokens: StepTokens, i: int) -> Table:
    """Return a table of the tokens of a row, with every number that is known."""
    assert tokens.texts is not None
    start = int(tokens.starts[i])
    lines = [
        [
            *(str(at - start), str(tokens.ids[at]), visible(repr(tokens.texts[at]))),
            *(_number(float(x[at])) for x in tokens.numbers.values()),
        ]
        for at in range(start, start + int(tokens.lengths[i]))
    ]
    return _table(f"row {i}", ["token", "id", "text", *tokens.numbers], lines)


def _show_what_if(found: WhatIf, rows: Sequence[int] | None) -> None:
    """Print what has changed: keys, numbers, gradients and completions."""
    console, sides = Console(), (found.was, found.would_be)
    console.rule(f"step {found.step}, if it had been otherwise")
    lines = [[key, str(was), str(now)] for key, (was, now) in found.changes.items()]
    console.print(_table("config", ["key", "was", "would be"], lines))
    names = [name for name in METRICS if any(name in side.metrics for side in sides)]
    lines = [[name, *(_number(side.metrics.get(name)) for side in sides)] for name in names]
    console.print(_table("the step", ["metric", "was", "would be"], lines))
    angles = {name: found.angle(name) for name in (None, *found.was.gradient)}
    known = {name: -1.0 if math.isnan(angle) else angle for name, angle in angles.items()}
    turned = sorted(found.was.gradient, key=known.__getitem__, reverse=True)
    lines = [
        [name or "the gradient", f"{_number(angles[name])}°", *map(_number, found.lengths(name))]
        for name in (None, *turned[:MOST_TENSORS])
    ]
    head = ["of", "angle", "length was", "would be"]
    console.print(_table("gradients, and the tensors that turn most", head, lines))
    batch = found.batch
    _check_rows(rows, batch.num_rows)
    means = [mean_advantages(side.advantages, batch.action_mask) for side in sides]
    change = (means[1] - means[0]).abs().nan_to_num()
    most = torch.argsort(change, descending=True, stable=True)[:MOST_ROWS].tolist()
    lines = [
        [
            str(i),
            f"{batch.groups[i]} {_short(batch.prompts[i])}",
            _short(batch.completions[i]),
            *(", ".join(f"{n} {_number(x[i])}" for n, x in side.rewards.items()) for side in sides),
            *(_number(mean[i].item()) for mean in means),
        ]
        for i in (most if rows is None else rows)
    ]
    head = ["row", "prompt", "completion", "scores", "would be", "advantage", "would be"]
    console.print(_table("completions, by the change of their advantage", head, lines))


def _check_rows(rows: Sequence[int] | None, count: int) -> None:
    for row in rows or ():
        if row >= count:
            fail(f"--rows {row}: the step has rows 0 to {count - 1}")


def _table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in head:
        table.add_column(visible(name), overflow="fold")  # a number that is cut off is another one
    for line in lines:
        table.add_row(*(Text(visible(cell)) for cell in line))
    return table


def _short(said: Any) -> str:
    """Return the beginning of a text, or of the last message of a chat, on one line."""
    text = said if isinstance(said, str) else text_of(said[-1]) if said else ""
    return repr(text if len(text) <= 40 else f"{text[:36]} ...")[1:-1]


def _number(value: Any) -> str:
    """Return a number with four digits, or a dash for one that is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
