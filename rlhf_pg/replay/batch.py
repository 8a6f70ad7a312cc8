"""The batch of a step: its completions with scores, from whatever the run has kept of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pg.replay.evidence import row_of
from rlhf_pg.replay.finding import Row
from rlhf_pg.replay.pair import Remake
from rlhf_pg.report.run_files import RunFiles, StepTokens


@dataclass(kw_only=True)
class Entry:
    """A completion of a batch; None for what the run has not kept."""

    row: Row
    prompt: Any = None
    completion: Any = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float | None = None


def batch_of(run: RunFiles, step: int, remake: Remake | None = None) -> list[Entry]:
    """Return the completions of a step in their order; empty if nothing of them is kept.

    Args:
        remake: makes the step again, for its tokens where they are not kept.
    """
    entries = _traced(run, step)
    _add_texts(entries, run, step)
    if any(entry.completion is None for entry in entries.values()) or not entries:
        tokens = run.tokens(step) or (remake(Path(run.directory), step) if remake else None)
        if tokens is not None:
            _add_tokens(entries, tokens)
    return list(entries.values())


Entries = dict[tuple[int | None, int | None], Entry]


def _traced(run: RunFiles, step: int) -> Entries:
    trace = run.traces.get(step)
    if trace is None:
        return {}
    entries: Entries = {}
    for place in range(len(trace.ids)):
        row = row_of(trace, place)
        entries[row.prompt_index, row.sample] = Entry(
            row=row,
            rewards={name: scores[place] for name, scores in trace.rewards.items()},
            advantage=trace.advantages[place],
        )
    return entries


def _add_texts(entries: Entries, run: RunFiles, step: int) -> None:
    """Add what completions.jsonl has of the step."""
    for number, line in enumerate(line for line in run.completions if line["step"] == step):
        index, sample = line.get("prompt_index"), line.get("sample")
        key = (index, sample) if index is not None else (None, number)
        entry = entries.setdefault(key, Entry(row=Row(prompt_index=index, sample=sample)))
        entry.prompt, entry.completion = line.get("prompt"), line.get("completion")
        entry.rewards |= {
            name.removeprefix("rewards/"): score
            for name, score in line.items()
            if name.startswith("rewards/")
        }
        entry.advantage = line.get("advantage", entry.advantage)


def _add_tokens(entries: Entries, tokens: StepTokens) -> None:
    """Add the texts of completions, as their tokens have them."""
    ends = np.cumsum(tokens.lengths.astype(np.int64)).tolist()
    for place, (index, sample) in enumerate(
        zip(tokens.prompt_index.tolist(), tokens.sample.tolist(), strict=True)
    ):
        row = Row(prompt_index=index, sample=sample)
        entry = entries.setdefault((index, sample), Entry(row=row))
        start = ends[place] - int(tokens.lengths[place])
        if entry.completion is None:
            entry.completion = "".join(tokens.texts[start : ends[place]])
