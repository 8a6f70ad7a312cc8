"""Tables of a replayed step, and of a step with other settings."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlhf_pg.boundary.terminal import literal
from rlhf_pg.data.chat import last_text
from rlhf_pg.data.row_files import StepTokens
from rlhf_pg.replay.replay import Made
from rlhf_pg.replay.what_if import WhatIf, mean_advantages

MOST_ROWS = 16
MOST_TENSORS = 5  # of tables, unless rows are chosen
METRICS = (
    "reward",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "value_loss",
)


def show_step(made: Made, rows: Sequence[int] | None) -> None:
    """Print a step: its differences from the record, its metrics, and its completions."""
    console = Console()
    record = made.record
    tokens = made.record.tokens
    assert tokens is not None
    stages = ", ".join(mismatch.stage for mismatch in made.differs)
    console.rule(f"step {made.step}: {f'differs: {stages}' if stages else 'as it was recorded'}")
    for mismatch in made.differs:
        console.print(
            literal(f"{mismatch.what}: {mismatch.a} | {mismatch.b} ({mismatch.rows} differ)")
        )
    names = [name for name in METRICS if name in made.metrics]
    console.print("  ".join(f"{name} {_cell(made.metrics[name])}" for name in names))
    sources = record.trace["sources"]
    lines = []
    total = len(tokens.lengths)
    chosen = _chosen(rows, total, range(min(MOST_ROWS, total)))
    for i in chosen:
        completion = record.completions[i]
        sample = f"{completion['prompt_index']}.{completion['sample']}"
        prompt = f"{sample} {_short(completion['prompt'])}"
        scores = [completion[f"rewards/{name}"] for name in sources]
        line = [
            i,
            prompt,
            _short(completion["completion"]),
            *scores,
        ]
        lines.append([*line, completion["advantage"], int(tokens.lengths[i])])
    head = [
        "row",
        "prompt",
        "completion",
        *sources,
        "advantage",
        "tokens",
    ]
    console.print(_table("completions", head, lines))
    if len(chosen) < total and rows is None:
        console.print(f"{total - len(chosen)} more rows: --rows {len(chosen)} ...")
    for i in rows or ():
        console.print(_tokens(tokens, i))


def _tokens(tokens: StepTokens, i: int) -> Table:
    """Return a table of the tokens of a row, with all recorded numbers."""
    assert tokens.texts is not None
    start = int(tokens.starts[i])
    span = slice(start, start + int(tokens.lengths[i]))
    columns = [column[span].tolist() for column in (tokens.ids, *tokens.numbers.values())]
    texts = [repr(text) for text in tokens.texts[span]]
    lines = zip(range(len(texts)), texts, *columns, strict=True)
    return _table(f"row {i}", ["token", "text", "id", *tokens.numbers], lines)


def show_what_if(result: WhatIf, rows: Sequence[int] | None) -> None:
    """Print the changes: keys, metrics, gradients and completions."""
    console = Console()
    sides = (result.was, result.would_be)
    batch = result.batch
    console.rule(f"step {result.step}, if it had been otherwise")
    lines: list[Any] = [[key, str(was), str(now)] for key, (was, now) in result.changes.items()]
    console.print(_table("config", ["key", "was", "would be"], lines))
    lines = []
    for name in METRICS:
        numbers = [side.metrics.get(name) for side in sides]
        if numbers != [None, None]:
            lines.append([name, *numbers])
    console.print(_table("the step", ["metric", "was", "would be"], lines))
    angles = {name: result.angle(name) for name in result.was.gradient}
    known = [name for name, angle in angles.items() if not math.isnan(angle)]
    known.sort(key=lambda name: -angles[name])
    lines = []
    for tensor in (None, *known[:MOST_TENSORS]):
        angle = f"{_cell(result.angle(tensor))}°"
        lines.append(
            [
                tensor or "the gradient",
                angle,
                *result.lengths(tensor),
            ]
        )
    head = ["of", "angle", "length was", "would be"]
    console.print(_table("gradients, and the tensors that turn most", head, lines))
    means = [mean_advantages(side.advantages, batch.action_mask) for side in sides]
    change = (means[1] - means[0]).abs().nan_to_num()
    most = torch.argsort(change, descending=True, stable=True)[:MOST_ROWS].tolist()
    lines = []
    for i in _chosen(rows, batch.num_rows, most):
        line = [
            i,
            f"{batch.groups[i]} {_short(batch.prompts[i])}",
            _short(batch.completions[i]),
        ]
        for side in sides:
            scores = [f"{name} {_cell(column[i])}" for name, column in side.rewards.items()]
            line.append(", ".join(scores))
        lines.append([*line, *(mean[i].item() for mean in means)])
    head = [
        "row",
        "prompt",
        "completion",
        "scores",
        "would be",
        "advantage",
        "would be",
    ]
    console.print(
        _table(
            "completions, by the change of their advantage",
            head,
            lines,
        )
    )


def _chosen(rows: Sequence[int] | None, total: int, others: Sequence[int]) -> Sequence[int]:
    if rows and max(rows) >= total:
        raise ValueError(f"--rows {max(rows)}: the step has rows 0 to {total - 1}")
    return rows or others


def _table(title: str, head: Sequence[str], lines: Iterable[Iterable[Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in head:
        table.add_column(literal(name), overflow="fold")  # a truncated number would be another one
    for line in lines:
        table.add_row(*(literal(_cell(value)) for value in line))
    return table


def _short(text_or_chat: Any) -> str:
    """Return the beginning of a text, or of the last message of a chat, on one line."""
    text = last_text(text_or_chat)
    return repr(text if len(text) <= 40 else f"{text[:36]} ...")[1:-1]


def _cell(value: Any) -> str:
    """Return a text, a number with four digits, or a dash if it is unknown."""
    if isinstance(value, str | int):
        return str(value)
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.4g}"
