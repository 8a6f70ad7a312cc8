"""The first difference between two runs, from their files.

A step computes in this order: prompts, sampled ids, their log-probabilities, scores, advantages,
the gradient, the weights. The first difference causes the later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.replay.comparison import differing, environment_of, name_runs
from rlhf_pg.report.run_files import PLACES, StepTokens, tokens_file

GRADIENT = ("loss", "grad_norm", "value_loss")  # metrics that only the update computes


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place where two runs differ, with both values."""

    stage: str  # prompts, ids, logprobs, scores, advantages, gradient or weights
    what: str  # the completion and token, the metric or the tensor
    a: Any
    b: Any
    rows: int = 1  # how many completions (metrics, tensors) differ in this stage


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between two runs."""

    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # differing keys
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # The first step that differs; 0 is the weights before the first step; None if none does.
    step: int | None = None
    places: Sequence[Place] = ()  # the first place of every stage that differs in that step
    steps: int = 0  # number of compared steps
    only_a: int = 0  # number of steps that only one of the runs took
    only_b: int = 0

    def __bool__(self) -> bool:
        other = self.config, self.versions, self.only_a, self.only_b
        return self.step is not None or any(other)


def diff_runs(a: Path, b: Path, rtol: float = 0.0) -> Difference:
    """Compare two runs up to the first step that differs.

    Numbers are equal within a share `rtol` of the largest of their kind; 0 means bit by bit. Above
    0 weights are not compared, since a run keeps only their hashes.
    """
    names = name_runs([a, b])
    one, other = names.values()
    config = differing({name: run.config for name, run in names.items()})
    versions = differing({name: environment_of(run) for name, run in names.items()})
    lines = [{line["step"]: line for line in run.metrics} for run in (one, other)]
    steps = [lines[0].keys() | one.traces.keys(), lines[1].keys() | other.traces.keys()]
    common = sorted(steps[0] & steps[1])
    found: list[Place] = []
    step = 0
    if rtol == 0 and one.starts and other.starts:
        first, second = one.starts[0], other.starts[0]
        alike = (first.backend, first.processes) == (second.backend, second.processes)
        if alike or first.backend == second.backend == "DDP":  # else they are sharded differently
            found = compare_weights(first.weights, second.weights)
    for step in common if not found else ():
        files = [tokens_file(run.directory, step) for run in (one, other)]
        there = all(file.is_file() for file in files)
        if there and files[0].read_bytes() != files[1].read_bytes():
            records = one.tokens(step), other.tokens(step)
            if records[0] is not None and records[1] is not None:
                sources = one.traces.get(step, {}).get("sources", [])
                found += compare_tokens(records[0], records[1], sources, rtol)
        found += compare_metrics(lines[0].get(step, {}), lines[1].get(step, {}), rtol)
        if rtol == 0 and step in one.weights and step in other.weights:
            found += compare_weights(one.weights[step], other.weights[step])
        if found:
            break
    return Difference(
        config={key: (x, y) for key, x, y in config if key not in PLACES},
        versions={key: (x, y) for key, x, y in versions},
        step=step if found else None,
        places=found,
        steps=len(common),
        only_a=len(steps[0] - steps[1]),
        only_b=len(steps[1] - steps[0]),
    )


def describe(found: Difference, a: Path, b: Path) -> Iterator[str]:
    """Yield lines on the differences between two runs."""
    yield f"A: {a}\nB: {b}"
    for title, entries in (("config", found.config), ("versions", found.versions)):
        if entries:
            yield f"{title}:"
            yield from (f"  {key}: {one} | {other}" for key, (one, other) in entries.items())
    if found.step is None:
        yield f"no difference in {found.steps} steps"
    for i, place in enumerate(found.places):
        if i == 0:
            when = f"step {found.step}" if found.step else "before the first step"
            yield f"{when}: {place.stage} differ first"
        more = f" (and {place.rows - 1} more)" if place.rows > 1 else ""
        yield f"  {place.stage}: {place.what}: {place.a} | {place.b}{more}"
    for name, count in (("A", found.only_a), ("B", found.only_b)):
        if count:
            yield f"{count} steps only in {name}"


def compare_weights(a: Mapping[str, str], b: Mapping[str, str]) -> list[Place]:
    """Compare hashes of tensors by name; return the first difference, if any."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [
        Place(stage="weights", what=name, a=a.get(name), b=b.get(name), rows=len(names))
        for name in names[:1]
    ]


def compare_metrics(
    a: Mapping[str, Any], b: Mapping[str, Any], rtol: float = 0.0
) -> Iterator[Place]:
    """Compare losses and gradient norms of the same step."""
    both = [key for key in GRADIENT if a.get(key) is not None and b.get(key) is not None]
    far = [key for key in both if abs(a[key] - b[key]) > rtol * max(abs(a[key]), abs(b[key]))]
    for key in far[:1]:
        yield Place(stage="gradient", what=key, a=a[key], b=b[key], rows=len(far))


def compare_tokens(
    a: StepTokens, b: StepTokens, sources: Sequence[str], rtol: float = 0.0
) -> Iterator[Place]:
    """Yield the first difference in every stage, up to one whose rows do not correspond."""
    facts = [
        list(zip(x.prompt_index.tolist(), x.row.tolist(), x.prompts(), strict=True)) for x in (a, b)
    ]
    pairs = list(zip_longest(*facts))
    if other := [i for i, (one, two) in enumerate(pairs) if one != two]:
        i = other[0]
        what = _name(a if i < len(a.lengths) else b, i)
        yield Place(stage="prompts", what=what, a=pairs[i][0], b=pairs[i][1], rows=len(other))
        return
    kept = [np.split(np.stack([x.ids, x.action]), x.starts[1:], axis=1) for x in (a, b)]
    if other := [i for i in range(len(pairs)) if not np.array_equal(kept[0][i], kept[1][i])]:
        i = other[0]
        tokens = list(zip_longest(*(map(tuple, x[i].T.tolist()) for x in kept)))
        token = next(t for t, (one, two) in enumerate(tokens) if one != two)
        ids = ["no token" if x is None else x[0] for x in tokens[token]]
        what = f"{_name(a, i)}, token {token}"
        yield Place(stage="ids", what=what, a=ids[0], b=ids[1], rows=len(other))
        return
    name = "sampler_logprob"
    yield from _first_token("logprobs", a, name, a.numbers[name], b.numbers[name], rtol)
    widths = [x.scores.shape[1] for x in (a, b)]
    if widths[0] != widths[1]:
        yield Place(stage="scores", what="number of sources", a=widths[0], b=widths[1])
    else:
        for k, columns in enumerate(zip(a.dense_scores().T, b.dense_scores().T, strict=True)):
            name = sources[k] if k < len(sources) else f"source {k}"
            yield from _first_token("scores", a, name, *columns, rtol)
    name = "advantage"
    yield from _first_token("advantages", a, name, a.numbers[name], b.numbers[name], rtol)


def _first_token(
    stage: str, record: StepTokens, name: str, a: NDArray[Any], b: NDArray[Any], rtol: float
) -> Iterator[Place]:
    """Compare a number of all tokens; yield the first difference."""
    known = np.concatenate([a[~np.isnan(a)], b[~np.isnan(b)], np.zeros(1)])
    near = np.isclose(a, b, rtol=0, atol=rtol * np.abs(known).max(), equal_nan=True)
    far = (~near).nonzero()[0]
    if len(far):
        row = np.searchsorted(record.starts + record.lengths, far, side="right")
        token = int(far[0] - record.starts[row[0]])
        what = f"{_name(record, int(row[0]))}, token {token}: {name}"
        rows = len(np.unique(row))
        yield Place(stage=stage, what=what, a=float(a[far[0]]), b=float(b[far[0]]), rows=rows)


def _name(record: StepTokens, i: int) -> str:
    index, sample, row = record.prompt_index[i], record.sample[i], record.row[i]
    return f"prompt {index}, sample {sample} (row {row} of the data)"
