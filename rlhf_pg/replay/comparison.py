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
from rlhf_pg.data.row_files import StepTokens
from rlhf_pg.report.html import table, write_document
from rlhf_pg.report.run_files import (
    RunFiles,
    tokens_file,
)
from rlhf_pg.report.run_page import charts_of, curve_data, plain
from rlhf_pg.report.troubles import WINDOW, values

ABSENT = "-"
GRADIENT = (
    "loss",
    "grad_norm",
    "value_loss",
)  # metrics that only the update computes


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


def difference_tables(
    runs: Mapping[str, RunFiles],
) -> list[dict[str, Any]]:
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


def _results(
    lines: Sequence[Mapping[str, Any]],
) -> dict[str, float | None]:
    """Return the steps and rewards of a run."""
    keys = (
        "step",
        "num_tokens",
        "step_time",
        "reward",
        "eval_reward",
    )
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
    return {
        "processes": start.processes,
        "backend": start.backend,
        "device": start.device,
        **start.versions,
    }


def differing(
    by_run: Mapping[str, Mapping[str, Any]],
) -> list[list[str]]:
    """Return a row for each key whose value is not the same in all runs."""
    rows = []
    for key in dict.fromkeys(key for config in by_run.values() for key in config):
        texts = []
        for config in by_run.values():
            texts.append(plain(config[key]) if key in config else ABSENT)
        if len(set(texts)) > 1:
            rows.append([str(key), *texts])
    return rows


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """What differs between two runs, with both values."""

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
    places: Sequence[Mismatch] = ()  # the first of every stage that differs in that step
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
    first, second = names.values()
    config = differing({name: run.config for name, run in names.items()})
    versions = differing({name: environment_of(run) for name, run in names.items()})
    steps = _steps(first)
    others = _steps(second)
    common = sorted(steps & others)
    step = 0
    mismatches = _compare_starts(first, second) if rtol == 0 else []
    if not mismatches:
        for step in common:
            mismatches = _compare_step(first, second, step, rtol)
            if mismatches:
                break
    return Difference(
        config={key: (x, y) for key, x, y in config if effect_of(key) != "output"},
        versions={key: (x, y) for key, x, y in versions},
        step=step if mismatches else None,
        places=mismatches,
        steps=len(common),
        only_a=len(steps - others),
        only_b=len(others - steps),
    )


def _steps(run: RunFiles) -> set[int]:
    return {line["step"] for line in run.metrics} | run.traces.keys()


def _metrics(run: RunFiles, step: int) -> dict[str, Any]:
    return next((line for line in run.metrics if line["step"] == step), {})


def _compare_starts(first: RunFiles, second: RunFiles) -> list[Mismatch]:
    """Compare the first weights of two runs, unless they were sharded differently."""
    if not first.starts or not second.starts:
        return []
    a = first.starts[0]
    b = second.starts[0]
    if a.backend != b.backend or (a.backend != "DDP" and a.processes != b.processes):
        return []
    return compare_weights(a.weights, b.weights)


def _compare_step(first: RunFiles, second: RunFiles, step: int, rtol: float) -> list[Mismatch]:
    """Compare a step that both runs have taken."""
    mismatches: list[Mismatch] = []
    files = [tokens_file(run.directory, step) for run in (first, second)]
    are_files = all(file.is_file() for file in files)
    if are_files and files[0].read_bytes() != files[1].read_bytes():
        a = first.tokens(step)
        b = second.tokens(step)
        if a is not None and b is not None:
            sources = first.traces.get(step, {}).get("sources", [])
            mismatches += compare_tokens(a, b, sources, rtol)
    mismatches += compare_metrics(_metrics(first, step), _metrics(second, step), rtol)
    if rtol == 0 and step in first.weights and step in second.weights:
        mismatches += compare_weights(first.weights[step], second.weights[step])
    return mismatches


def describe(difference: Difference, a: Path, b: Path) -> Iterator[str]:
    """Yield lines on the differences between two runs."""
    yield f"A: {a}\nB: {b}"
    for title, entries in (
        ("config", difference.config),
        ("versions", difference.versions),
    ):
        if entries:
            yield f"{title}:"
        for key, (x, y) in entries.items():
            yield f"  {key}: {x} | {y}"
    if difference.step is None:
        yield f"no difference in {difference.steps} steps"
    for i, mismatch in enumerate(difference.places):
        if i == 0:
            when = f"step {difference.step}" if difference.step else "before the first step"
            yield f"{when}: {mismatch.stage} differ first"
        others = f" (and {mismatch.rows - 1} more)" if mismatch.rows > 1 else ""
        yield f"  {mismatch.stage}: {mismatch.what}: {mismatch.a} | {mismatch.b}{others}"
    for name, count in (
        ("A", difference.only_a),
        ("B", difference.only_b),
    ):
        if count:
            yield f"{count} steps only in {name}"


def compare_weights(a: Mapping[str, str], b: Mapping[str, str]) -> list[Mismatch]:
    """Compare hashes of tensors by name; return the first difference, if any."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if not names:
        return []
    name = names[0]
    return [
        Mismatch(
            stage="weights",
            what=name,
            a=a.get(name),
            b=b.get(name),
            rows=len(names),
        )
    ]


def compare_metrics(
    a: Mapping[str, Any], b: Mapping[str, Any], rtol: float = 0.0
) -> Iterator[Mismatch]:
    """Compare losses and gradient norms of the same step."""
    far = []
    for key in GRADIENT:
        x = a.get(key)
        y = b.get(key)
        if x is not None and y is not None and abs(x - y) > rtol * max(abs(x), abs(y)):
            far.append(key)
    for key in far[:1]:
        yield Mismatch(
            stage="gradient",
            what=key,
            a=a[key],
            b=b[key],
            rows=len(far),
        )


def compare_tokens(
    a: StepTokens,
    b: StepTokens,
    sources: Sequence[str],
    rtol: float = 0.0,
) -> Iterator[Mismatch]:
    """Yield the first difference in every stage, up to one whose rows do not correspond."""
    pairs = list(zip_longest(_rows(a), _rows(b)))
    differing_rows = [i for i, (x, y) in enumerate(pairs) if x != y]
    if differing_rows:
        i = differing_rows[0]
        what = _name(a if i < len(a.lengths) else b, i)
        x, y = pairs[i]
        yield Mismatch(
            stage="prompts",
            what=what,
            a=x,
            b=y,
            rows=len(differing_rows),
        )
        return
    pairs = list(zip(_completions(a), _completions(b), strict=True))
    differing_rows = [i for i, (x, y) in enumerate(pairs) if x != y]
    if differing_rows:
        i = differing_rows[0]
        tokens = zip_longest(*pairs[i], fillvalue=("no token", None))
        token, (x, y) = next(pair for pair in enumerate(tokens) if pair[1][0] != pair[1][1])
        what = f"{_name(a, i)}, token {token}"
        yield Mismatch(
            stage="ids",
            what=what,
            a=x[0],
            b=y[0],
            rows=len(differing_rows),
        )
        return
    name = "sampler_logprob"
    yield from _first_token("logprobs", a, name, a.number(name), b.number(name), rtol)
    x = a.scores.shape[1]
    y = b.scores.shape[1]
    if x != y:
        yield Mismatch(stage="scores", what="number of sources", a=x, b=y)
    else:
        for k, columns in enumerate(zip(a.dense_scores().T, b.dense_scores().T, strict=True)):
            name = sources[k] if k < len(sources) else f"source {k}"
            yield from _first_token("scores", a, name, *columns, rtol)
    name = "advantage"
    yield from _first_token("advantages", a, name, a.number(name), b.number(name), rtol)


def _rows(record: StepTokens) -> list[Any]:
    """Return prompt index, row of the dataset and prompt of each completion."""
    prompts = record.prompts()
    return list(
        zip(
            record.prompt_index.tolist(),
            record.row.tolist(),
            prompts,
            strict=True,
        )
    )


def _completions(record: StepTokens) -> list[list[tuple[int, ...]]]:
    """Return the ids of each completion, each with whether the policy chose it."""
    tokens = np.stack([record.ids, record.action], axis=1)
    parts = np.split(tokens, record.starts[1:])
    return [list(map(tuple, part.tolist())) for part in parts]


def _first_token(
    stage: str,
    record: StepTokens,
    name: str,
    a: NDArray[Any],
    b: NDArray[Any],
    rtol: float,
) -> Iterator[Mismatch]:
    """Compare a number of all tokens; yield the first difference."""
    known = np.concatenate([a[~np.isnan(a)], b[~np.isnan(b)], np.zeros(1)])
    near = np.isclose(
        a,
        b,
        rtol=0,
        atol=rtol * np.abs(known).max(),
        equal_nan=True,
    )
    far = (~near).nonzero()[0]
    if len(far):
        row = np.searchsorted(record.starts + record.lengths, far, side="right")
        token = int(far[0] - record.starts[row[0]])
        what = f"{_name(record, int(row[0]))}, token {token}: {name}"
        rows = len(np.unique(row))
        yield Mismatch(
            stage=stage,
            what=what,
            a=float(a[far[0]]),
            b=float(b[far[0]]),
            rows=rows,
        )


def _name(record: StepTokens, i: int) -> str:
    index = record.prompt_index[i]
    sample = record.sample[i]
    row = record.row[i]
    return f"prompt {index}, sample {sample} (row {row} of the data)"
