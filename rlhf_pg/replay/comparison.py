"""Compare runs by their files: several in one page, or two up to their first difference.

A step computes in this order: prompts, sampled ids, their log-probabilities, scores, advantages,
the gradient, the weights. The first difference causes the later ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.config.run import effect_of
from rlhf_pg.report.html import table, write_document
from rlhf_pg.report.run_files import RunFiles, StepTokens, tokens_file
from rlhf_pg.report.run_page import charts_of, curve_data, plain
from rlhf_pg.report.troubles import WINDOW, values

ABSENT = "-"
GRADIENT = ("loss", "grad_norm", "value_loss")  # metrics that only the update computes


def write_comparison(directories: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs, with a chart for each metric, and return its path."""
    runs = name_runs(directories)
    curves = [curve_data(files) | {"name": visible(name)} for name, files in runs.items()]
    charts = []
    for chart in charts_of(dict.fromkeys(key for curve in curves for key in curve["metrics"])):
        for key in chart["keys"]:
            title = chart["title"] if len(chart["keys"]) == 1 else f"{chart['title']}: {key}"
            charts.append(chart | {"title": title, "keys": [key]})
    data = {
        "kind": "compare",
        "title": visible(" | ".join(runs)),
        "subtitle": [f"{len(runs)} runs"],
        "runs": curves,
        "charts": charts,
        "absent": [],
        "warnings": [],
        "tables": difference_tables(runs),
    }
    write_document(out, " | ".join(runs), data)
    return out


def name_runs(directories: Sequence[Path]) -> dict[str, RunFiles]:
    """Return runs by unique names: as many last parts of each path as necessary."""
    paths = [directory.absolute() for directory in directories]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{i + 1}: {path}" for i, path in enumerate(paths)]  # the same run twice
    return {name: RunFiles(path) for name, path in zip(names, paths, strict=True)}


def difference_tables(runs: Mapping[str, RunFiles]) -> list[dict[str, Any]]:
    """Return results, and the keys and versions in which runs differ."""
    columns = [_results(files.metrics) for files in runs.values()]
    known = [key for key in columns[0] if any(column[key] is not None for column in columns)]
    results = [[key, *(_spell(column[key]) for column in columns)] for key in known]
    config = differing({name: files.config for name, files in runs.items()})
    config.sort(key=lambda row: effect_of(row[0]) == "output")
    versions = differing({name: environment_of(files) for name, files in runs.items()})
    unknown = [name for name, files in runs.items() if not files.starts]
    note = "" if versions else "The same packages, device and number of processes."
    return [
        table("Results", ["", *runs], results),
        table(
            "Config: what differs",
            ["key", *runs],
            config,
            sum(effect_of(row[0]) == "output" for row in config),
            "" if config else "Their configs have the same values.",
        ),
        table(
            "Versions: what differs",
            ["", *runs],
            versions,
            note=f"Not known of {', '.join(unknown)}." if unknown else note,
        ),
    ]


def _results(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the steps and rewards of a run."""
    keys = ("step", "num_tokens", "step_time", "reward", "eval_reward")
    steps, tokens, seconds, rewards, held_out = (
        [value for _, value in values(lines, key)] for key in keys
    )
    return {
        "steps": steps[-1] if steps else 0,
        "tokens": tokens[-1] if tokens else None,
        "seconds": sum(seconds) or None,
        f"reward, mean of the last {WINDOW} steps": fmean(rewards[-WINDOW:]) if rewards else None,
        "best held-out reward": max(held_out, default=None),
        "last held-out reward": held_out[-1] if held_out else None,
    }


def _spell(number: float | None) -> str:
    if number is None:
        return ABSENT
    if abs(number) >= 1000 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def environment_of(files: RunFiles) -> dict[str, Any]:
    """Return the environment of a run: processes, backend, device and versions."""
    if not files.starts:
        return {}
    start = files.starts[-1]
    own = {"processes": start.processes, "backend": start.backend, "device": start.device}
    return own | dict(start.versions)


def differing(by_run: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each key whose value is not the same in all runs."""
    keys = dict.fromkeys(key for own in by_run.values() for key in own)
    rows = [
        [str(key), *(plain(own[key]) if key in own else ABSENT for own in by_run.values())]
        for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


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
        first = one.starts[0]
        second = other.starts[0]
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
        config={key: (x, y) for key, x, y in config if effect_of(key) != "output"},
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
    yield from _first_token("logprobs", a, name, a.number(name), b.number(name), rtol)
    widths = [x.scores.shape[1] for x in (a, b)]
    if widths[0] != widths[1]:
        yield Place(stage="scores", what="number of sources", a=widths[0], b=widths[1])
    else:
        for k, columns in enumerate(zip(a.dense_scores().T, b.dense_scores().T, strict=True)):
            name = sources[k] if k < len(sources) else f"source {k}"
            yield from _first_token("scores", a, name, *columns, rtol)
    name = "advantage"
    yield from _first_token("advantages", a, name, a.number(name), b.number(name), rtol)


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
    index = record.prompt_index[i]
    sample = record.sample[i]
    row = record.row[i]
    return f"prompt {index}, sample {sample} (row {row} of the data)"
