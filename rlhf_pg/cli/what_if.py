"""The output of `rlhf-pg replay RUN --step N --key value`: what would have changed."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.replay.again import Replay
from rlhf_pg.replay.what_if import GRADIENT, UPDATE, WhatIf
from rlhf_pg.replay.what_if import what_if as compute
from rlhf_pg.trainers import PolicyGradientTrainer

MOST = 10  # lines of each table
METRICS = ("reward", "loss", "kl", "entropy", "grad_norm", "clip_ratio/region_mean", "value_loss")


def what_if(replay: Replay, other: PolicyGradientTrainer, options: argparse.Namespace) -> None:
    """Make a step with other keys, and print what would have changed."""
    found = compute(replay, other, options.step)
    console = Console()
    console.rule(f"step {found.step}, if it had been otherwise")
    for table in tables(found, options.rows):
        console.print(table)


def tables(found: WhatIf, rows: Sequence[int] | None = None) -> list[Table]:
    """Return what has changed, as tables: keys, numbers, gradients, completions, tokens."""
    return [
        _table("config", ("key", "was", "would be"), _changes(found)),
        _table("the step", ("metric", "was", "would be"), _metrics(found)),
        _table(
            "gradients, and what the updates change",
            ("of", "angle", "length was", "would be"),
            _directions(found),
        ),
        _table(
            "completions that change most",
            ("row", "prompt", "completion", "rewards", "would be", "advantage", "would be"),
            _completions(found, rows),
        ),
        _table(
            "tokens whose pull changes most",
            ("row", "token", "text", "pull was", "would be"),
            _tokens(found),
        ),
    ]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _changes(found: WhatIf) -> list[list[str]]:
    return [[key, quoted(str(was)), quoted(str(now))] for key, (was, now) in found.changes.items()]


def _metrics(found: WhatIf) -> list[list[str]]:
    both = (found.was.metrics, found.would_be.metrics)
    names = [name for name in METRICS if any(name in side for side in both)]
    return [[name, *(_number(side.get(name)) for side in both)] for name in names]


def _directions(found: WhatIf) -> list[list[str]]:
    """Return lines for the whole gradient, the whole update, and the tensors that turn most."""
    lines = [_direction(found, which, which, None) for which in (GRADIENT, UPDATE)]
    names = sorted(found.was.gradient, key=lambda name: -_or_0(found.angle(GRADIENT, name)))
    return lines + [_direction(found, GRADIENT, name, name) for name in names[: MOST // 2]]


def _direction(found: WhatIf, which: str, label: str, name: str | None) -> list[str]:
    angle = found.angle(which, name)
    shown = "-" if math.isnan(angle) else f"{angle:.2f}°"
    return [label, shown, *map(_number, found.lengths(which, name))]


def _completions(found: WhatIf, rows: Sequence[int] | None) -> list[list[str]]:
    means = [_of_rows(side.advantages, found.mask) for side in (found.was, found.would_be)]
    order = (means[1] - means[0]).abs().nan_to_num().argsort(descending=True, stable=True)
    chosen = order[:MOST].tolist() if rows is None else rows
    return [
        [
            str(i),
            quoted(str(found.completions[i]["prompt_index"])),
            visible(repr(_text(found.completions[i]["completion"]))),
            *(_scores(side.rewards, i) for side in (found.was, found.would_be)),
            *(_number(mean[i].item()) for mean in means),
        ]
        for i in chosen
    ]


def _tokens(found: WhatIf) -> list[list[str]]:
    was, now = found.was.pull, found.would_be.pull
    order = (now - was).abs().flatten().argsort(descending=True, stable=True)[:MOST]
    starts = found.tokens.lengths.cumsum() - found.tokens.lengths
    lines = []
    for place in order.tolist():
        row, t = divmod(place, was.shape[1])
        text = (
            repr(found.tokens.texts[int(starts[row]) + t]) if t < found.tokens.lengths[row] else ""
        )
        lines.append(
            [str(row), str(t), text, _number(was[row, t].item()), _number(now[row, t].item())]
        )
    return lines


def _of_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, x, 0.0).double().sum(1) / mask.sum(1)


def _scores(rewards: Any, row: int) -> str:
    return ", ".join(f"{name} {_number(column[row])}" for name, column in rewards.items())


def _text(said: Any) -> str:
    text = said if isinstance(said, str) else str(said[-1].get("content", "")) if said else ""
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _or_0(x: float) -> float:
    return 0.0 if math.isnan(x) else x


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}"
