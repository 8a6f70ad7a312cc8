"""The first difference between two runs, from the files that they left.

What a step computes has an order: prompts, sampled ids, their log-probabilities, scores,
advantages, the gradient, the weights. What differs first is the cause of what differs after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.report.comparison import differing, environment_of, named_runs
from rlhf_pg.report.run_files import PLACES, RunFiles, StepTokens, tokens_file

GRADIENT = ("loss", "grad_norm", "value_loss")  # metrics that only the update computes


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place where two runs differ, with both values.

    Attributes:
        stage: prompts, ids, logprobs, scores, advantages, gradient or weights.
        what: the completion and token, the metric or the tensor.
        rows: how many completions (metrics, tensors) differ in this stage.
    """

    stage: str
    what: str
    a: Any
    b: Any
    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between two runs.

    Attributes:
        config, versions: what differs, by name, with both values.
        step: the first that differs; 0 is the weights before the first step; None if none does.
        places: the first place of every stage that differs in that step.
        steps: that were compared.
        only_a, only_b: the number of steps that only one of the runs took.
    """

    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step: int | None = None
    places: Sequence[Place] = ()
    steps: int = 0
    only_a: int = 0
    only_b: int = 0

    def __bool__(self) -> bool:
        lengths = bool(self.only_a or self.only_b)
        return bool(self.config or self.versions) or self.step is not None or lengths


def diff_runs(a: Path, b: Path, rtol: float = 0.0) -> Difference:
    """Compare two runs up to the first step that differs.

    Args:
        rtol: numbers are equal within this share of the largest of their kind; 0 is bit by bit.
            Above 0 weights are not compared, of which only hashes are kept.
    """
    one, other = RunFiles(a), RunFiles(b)
    names = named_runs([a, b])
    config = differing({name: run.config for name, run in names.items()})
    versions = differing({name: environment_of(run) for name, run in names.items()})
    lines = [{line["step"]: line for line in run.metrics} for run in (one, other)]
    steps = [lines[0].keys() | one.traces.keys(), lines[1].keys() | other.traces.keys()]
    common = sorted(steps[0] & steps[1])
    found, step = list(_weights_before(one, other) if rtol == 0 else ()), 0
    for step in common if not found else ():
        found = [
            *_recorded(one, other, step, rtol),
            *compare_metrics(lines[0].get(step, {}), lines[1].get(step, {}), rtol),
        ]
        if rtol == 0 and step in one.weights and step in other.weights:
            found += _differing_entries("weights", one.weights[step], other.weights[step])
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


def _weights_before(a: RunFiles, b: RunFiles) -> Iterator[Place]:
    """Compare the weights before the first step, unless they were sharded in different ways."""
    if not (a.starts and b.starts):
        return
    one, other = a.starts[0], b.starts[0]
    alike = (one.backend, one.processes) == (other.backend, other.processes)
    if alike or one.backend == other.backend == "DDP":
        yield from _differing_entries("weights", one.weights, other.weights)


def _differing_entries(stage: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Place]:
    """Compare by name; return the first place, if there is one."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [
        Place(stage=stage, what=name, a=a.get(name), b=b.get(name), rows=len(names))
        for name in names[:1]
    ]


def _recorded(a: RunFiles, b: RunFiles, step: int, rtol: float) -> Iterator[Place]:
    """Compare the records of a step, where both runs have one."""
    files = [tokens_file(run.directory, step) for run in (a, b)]
    there = all(file.is_file() for file in files)
    if there and files[0].read_bytes() != files[1].read_bytes():
        one, other = a.tokens(step), b.tokens(step)
        if one is not None and other is not None:
            sources = a.traces.get(step, {}).get("sources", [])
            yield from compare_tokens(one, other, sources, rtol)


def compare_metrics(
    a: Mapping[str, Any], b: Mapping[str, Any], rtol: float = 0.0
) -> Iterator[Place]:
    """Compare loss and gradient norm of a step that both have."""
    both = [key for key in GRADIENT if a.get(key) is not None and b.get(key) is not None]
    far = [key for key in both if abs(a[key] - b[key]) > rtol * max(abs(a[key]), abs(b[key]))]
    for key in far[:1]:
        yield Place(stage="gradient", what=key, a=a[key], b=b[key], rows=len(far))


def compare_tokens(
    a: StepTokens, b: StepTokens, sources: Sequence[str], rtol: float = 0.0
) -> Iterator[Place]:
    """Yield the first place of every stage that differs between two records of a step.

    Stages after one whose rows cannot be laid beside one another are left out.
    """
    rows = min(len(a.lengths), len(b.lengths))
    prompts = (a.prompts(), b.prompts())
    facts = [
        list(zip(x.prompt_index.tolist(), x.row.tolist(), own, strict=True))
        for x, own in zip((a, b), prompts, strict=True)
    ]
    other = [i for i in range(rows) if facts[0][i] != facts[1][i]]
    if other or len(a.lengths) != len(b.lengths):
        i = other[0] if other else rows
        shown = [own[i] if i < len(own) else None for own in facts]
        names = _name(a if i < len(a.lengths) else b, i)
        count = len(other) + abs(len(a.lengths) - len(b.lengths))
        yield Place(stage="prompts", what=names, a=shown[0], b=shown[1], rows=count)
        return
    kept = [np.split(np.stack([x.ids, x.action]), x.starts[1:], axis=1) for x in (a, b)]
    other = [i for i in range(rows) if not np.array_equal(kept[0][i], kept[1][i])]
    if other:
        i = other[0]
        one, two = ([tuple(pair) for pair in x[i].T.tolist()] for x in kept)
        token = next((t for t, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), None)
        token = min(len(one), len(two)) if token is None else token
        ids = [x[token][0] if token < len(x) else "no token" for x in (one, two)]
        what = f"{_name(a, i)}, token {token}"
        yield Place(stage="ids", what=what, a=ids[0], b=ids[1], rows=len(other))
        return
    yield from _numbers("logprobs", a, b, "sampler_logprob", rtol)
    scores = [_dense(x) for x in (a, b)]
    if scores[0].shape != scores[1].shape:
        widths = [x.shape[1] for x in scores]
        yield Place(stage="scores", what="number of sources", a=widths[0], b=widths[1])
    else:
        for k in range(scores[0].shape[1]):
            name = sources[k] if k < len(sources) else f"source {k}"
            yield from _first_token("scores", a, name, scores[0][:, k], scores[1][:, k], rtol)
    yield from _numbers("advantages", a, b, "advantage", rtol)


def _numbers(stage: str, a: StepTokens, b: StepTokens, name: str, rtol: float) -> Iterator[Place]:
    if name in a.numbers and name in b.numbers:
        yield from _first_token(stage, a, name, a.numbers[name], b.numbers[name], rtol)


def _first_token(
    stage: str, record: StepTokens, name: str, a: NDArray[Any], b: NDArray[Any], rtol: float
) -> Iterator[Place]:
    """Compare a number of all tokens; yield the first that differs."""
    known = np.concatenate([a[~np.isnan(a)], b[~np.isnan(b)], np.zeros(1)])
    near = np.isclose(a, b, rtol=0, atol=rtol * np.abs(known).max(), equal_nan=True)
    far = (~near).nonzero()[0]
    if len(far):
        row = np.searchsorted(record.starts + record.lengths, far, side="right")
        token = int(far[0] - record.starts[row[0]])
        what = f"{_name(record, int(row[0]))}, token {token}: {name}"
        rows = len(np.unique(row))
        yield Place(stage=stage, what=what, a=float(a[far[0]]), b=float(b[far[0]]), rows=rows)


def _dense(record: StepTokens) -> NDArray[Any]:
    """Return the scores of all tokens, (M,K); NaN where there are none."""
    dense = np.full((len(record.ids), record.scores.shape[1]), np.nan)
    dense[record.score_at] = record.scores
    return dense


def _name(record: StepTokens, i: int) -> str:
    index, sample, row = record.prompt_index[i], record.sample[i], record.row[i]
    return f"prompt {index}, sample {sample} (row {row} of the data)"
