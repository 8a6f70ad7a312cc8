"""Tables, and a page with the token view, of what would have changed in a step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_pg.boundary.quoted import quoted, visible
from rlhf_pg.data.chat import text_of
from rlhf_pg.replay.what_if import GRADIENT, UPDATE, Side, WhatIf
from rlhf_pg.report.html import Table
from rlhf_pg.report.run_page import token_page
from rlhf_pg.report.token_steps import Column, TokenStep

MOST = 10  # lines of each table
METRICS = ("reward", "loss", "kl", "entropy", "grad_norm", "clip_ratio/region_mean", "value_loss")
PULL = "how the loss falls as the log-probability rises, before the first update"
COLUMNS = {
    "advantage_what_if": Column("advantage (what if)", "with the other keys", "w"),
    "pull": Column("pull", f"as it was: {PULL}", "u"),
    "pull_what_if": Column("pull (what if)", f"with the other keys: {PULL}", "o"),
    "pull_change": Column("change of pull", "what the other keys add to the pull", "d"),
}


def write_page(found: WhatIf, out: Path) -> Path:
    """Write a page on which every token is coloured by either side, or by their difference."""
    was, now = found.was, found.would_be
    numbers = {
        "advantage_what_if": now.advantages,
        "pull": was.pull,
        "pull_what_if": now.pull,
        "pull_change": now.pull - was.pull,
    }
    flat = {name: _flat(x, found) for name, x in numbers.items()}
    tokens = dataclasses.replace(found.tokens, numbers={**found.tokens.numbers, **flat})
    records = [
        {**said, **{f"{name} (what if)": column[i] for name, column in now.rewards.items()}}
        for i, said in enumerate(found.completions)
    ]
    keys = ", ".join(f"{key} {is_}" for key, (_, is_) in found.changes.items())
    step = TokenStep(step=found.step, records=records, tokens=tokens)
    subtitle = quoted(f"step {found.step} with {keys}")
    return token_page("what if", subtitle, [step], out, columns=COLUMNS, tables=tables(found))


def tables(found: WhatIf, rows: Sequence[int] | None = None) -> list[Table]:
    """Return what has changed: keys, numbers, gradients, completions and tokens.

    Args:
        rows: completions to show; by default those that change most.
    """
    which = "completions that change most" if rows is None else "completions"
    sides = ("scores", "would be", "advantage", "would be")
    shown = {
        "config": (("key", "was", "would be"), _changes(found)),
        "the step": (("metric", "was", "would be"), _metrics(found)),
        "gradients, and what the updates change": (
            ("of", "angle", "length was", "would be"),
            _directions(found),
        ),
        which: (("row", "prompt", "completion", *sides), _completions(found, rows)),
        "tokens whose pull changes most": (
            ("row", "token", "text", "pull was", "would be"),
            _tokens(found),
        ),
    }
    return [Table(title=t, head=[*head], rows=lines) for t, (head, lines) in shown.items()]


def _flat(x: Tensor, found: WhatIf) -> NDArray[Any]:
    """Return a number (B,T) of the tokens one after another; NaN of those that nobody chose."""
    chosen = x.detach().masked_fill(~found.mask, math.nan).cpu().double().numpy()
    rows = [row[:length] for row, length in zip(chosen, found.tokens.lengths, strict=True)]
    return np.concatenate([np.zeros(0), *rows])


def _changes(found: WhatIf) -> list[list[str]]:
    return [[key, quoted(str(was)), quoted(str(now))] for key, (was, now) in found.changes.items()]


def _metrics(found: WhatIf) -> list[list[str]]:
    both = (found.was.metrics, found.would_be.metrics)
    names = [name for name in METRICS if any(name in side for side in both)]
    return [[name, *(number(side.get(name)) for side in both)] for name in names]


def _directions(found: WhatIf) -> list[list[str]]:
    """Return lines for the whole gradient, the whole update, and the tensors that turn most."""
    lines = [_direction(found, which, which, None) for which in (GRADIENT, UPDATE)]
    angles = {name: found.angle(GRADIENT, name) for name in found.was.gradient}
    names = sorted(angles, key=lambda name: -math.inf if math.isnan(angles[name]) else angles[name])
    most = names[: -MOST // 2 - 1 : -1]
    return lines + [_direction(found, GRADIENT, name, name) for name in most]


def _direction(found: WhatIf, which: str, label: str, name: str | None) -> list[str]:
    angle = found.angle(which, name)
    shown = "-" if math.isnan(angle) else f"{angle:.2f}°"
    return [label, shown, *map(number, found.lengths(which, name))]


def _completions(found: WhatIf, rows: Sequence[int] | None) -> list[list[str]]:
    sides = (found.was, found.would_be)
    means = [_of_rows(side.advantages, found.mask) for side in sides]
    order = (means[1] - means[0]).abs().nan_to_num().argsort(descending=True, stable=True)
    return [
        [
            str(i),
            str(found.completions[i]["prompt_index"]),
            short(found.completions[i]["completion"]),
            *(_scores(side, i) for side in sides),
            *(number(mean[i].item()) for mean in means),
        ]
        for i in (order[:MOST].tolist() if rows is None else rows)
    ]


def _tokens(found: WhatIf) -> list[list[str]]:
    was, now = found.was.pull, found.would_be.pull
    order = (now - was).abs().flatten().argsort(descending=True, stable=True)[:MOST]
    starts = found.tokens.lengths.cumsum() - found.tokens.lengths
    lines = []
    for place in order.tolist():
        row, t = divmod(place, was.shape[1])
        if t < found.tokens.lengths[row]:
            text = visible(repr(found.tokens.texts[int(starts[row]) + t]))
            pulls = (number(side[row, t].item()) for side in (was, now))
            lines.append([str(row), str(t), text, *pulls])
    return lines


def _of_rows(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).double().sum(1) / mask.sum(1)


def _scores(side: Side, row: int) -> str:
    rewards: Mapping[str, Sequence[float]] = side.rewards
    return ", ".join(f"{quoted(name)} {number(scores[row])}" for name, scores in rewards.items())


def short(said: Any, longest: int = 40) -> str:
    """Return the beginning of a text, or of the last message of a chat, on one line."""
    text = said if isinstance(said, str) else text_of(said[-1]) if said else ""
    cut = text if len(text) <= longest else f"{text[: longest - 4]} ..."
    return visible(repr(cut)[1:-1])


def number(value: Any) -> str:
    """Return a number with four digits, or a dash for one that is not known."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}"
