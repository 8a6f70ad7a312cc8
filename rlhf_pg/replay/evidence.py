"""Differences of a step, as its lines in trace.jsonl, metrics.jsonl and completions.jsonl tell."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlhf_pg.replay.finding import Finding, Row
from rlhf_pg.replay.rounding import Rounding, is_number, largest, least_size
from rlhf_pg.report.run_files import COMPLETIONS, METRICS, TRACE, Trace

# Numbers that say how long something took, or what it took.
OF_THE_WALL = ("time/", "step_time", "perf/", "memory/", "eval_time")
# Stages of metrics by how their names begin; the longest beginning counts. A number that only the
# update computes is of the gradient: an update before it in the same step may have changed it.
STAGE_OF_METRIC = {
    **dict.fromkeys(("num_tokens", "completions/", "episodes/", "tools/"), "sampled id"),
    **dict.fromkeys(("sampling/sampling_logp", "sampling/importance"), "log-probability"),
    "kl/completion": "log-probability",
    **dict.fromkeys(("reward", "rewards/", "frac_reward_zero_std", "return"), "reward"),
    "sampling/": "reward",  # groups are kept by their rewards
    **dict.fromkeys(("explained_variance", "moving_average"), "advantage"),
    **dict.fromkeys(("loss", "grad_norm", "entropy", "kl", "ratio", "clip_ratio/"), "gradient"),
    **dict.fromkeys(("policy_loss", "value_loss", "value_clip_ratio", "approx_kl"), "gradient"),
    **dict.fromkeys(("num_updates", "skipped_updates", "positive_nll", "aux_loss"), "gradient"),
    **dict.fromkeys(("kl_coef", "entropy_coef", "learning_rate", "beta", "eval_"), "metric"),
}
# What the columns of a trace are called where they are shown.
LABELS = {
    "prompts": "prompt (checksum of its ids)",
    "ids": "completion (checksum of its ids)",
    "logprobs": "log-probability (sum over tokens)",
    "values": "value (sum over tokens)",
    "advantages": "advantage (sum over tokens)",
    "rows": "row of the data",
    "prompt_index": "prompt index",
}
STAGE_OF_FIELD = {
    **dict.fromkeys(("prompt_index", "sample", "row"), "data order"),
    "prompt": "prompt text",
    **dict.fromkeys(("completion", "turns", "error", "length", "truncated"), "sampled id"),
    **dict.fromkeys(("reward", "rewards/"), "reward"),
    **dict.fromkeys(("logprob", "kl"), "log-probability"),
    **dict.fromkeys(("advantage", "value"), "advantage"),
}


def trace_findings(
    a: Trace, b: Trace, rounding: Rounding, fixed: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """Yield what differs between two traces of a step, but for their weights.

    Args:
        fixed: sources of reward that are plain functions, which no rounding changes.
    """
    for name in ("prompt_index", "rows"):
        yield from _column(a, b, name, "data order", Rounding())
    yield from _column(a, b, "prompts", "prompt text", Rounding())
    yield from _column(a, b, "ids", "sampled id", Rounding())
    yield from _column(a, b, "logprobs", "log-probability", rounding.of_sampler())
    if (a.values is None) != (b.values is None):
        yield _of_step(a, "value", TRACE, "values", a.values is not None, b.values is not None)
    yield from _column(a, b, "values", "value", rounding)
    for name in {**a.rewards, **b.rewards}:
        scores = a.rewards.get(name), b.rewards.get(name)
        if scores[0] is None or scores[1] is None:
            has = tuple(column is not None for column in scores)
            yield _of_step(a, "reward", TRACE, f"rewards/{name}", *has)
            continue
        within = Rounding() if name in fixed else rounding
        yield from _pairs(a, f"rewards/{name}", "reward", scores[0], scores[1], within)
    yield from _column(a, b, "advantages", "advantage", rounding)


def _column(a: Trace, b: Trace, name: str, stage: str, rounding: Rounding) -> Iterator[Finding]:
    first, second = getattr(a, name) or (), getattr(b, name) or ()
    yield from _pairs(a, name, stage, first, second, rounding)


def _pairs(
    a: Trace, name: str, stage: str, first: Sequence[Any], second: Sequence[Any], within: Rounding
) -> Iterator[Finding]:
    if first == second:
        return
    if len(first) != len(second):
        yield _of_step(a, stage, TRACE, f"number of {name}", len(first), len(second))
    scale = max(largest(first, second), least_size(name))
    by_prompt = name in ("prompt_index", "rows")
    for i, (x, y) in enumerate(zip(first, second, strict=False)):
        if not within.same(x, y, scale):
            place = i * a.num_generations if by_prompt else i
            row = row_of(a, place, by_prompt)
            found = _of_step(a, stage, TRACE, LABELS.get(name, name), x, y)
            yield Finding(**{**vars(found), "row": row, "place": place})


def row_of(trace: Trace, place: int, by_prompt: bool = False) -> Row:
    """Name a completion of a traced step by its place in the step."""
    n = trace.num_generations
    k, sample = divmod(place, n) if n else (place, 0)
    return Row(
        prompt_index=trace.prompt_index[k] if k < len(trace.prompt_index) else None,
        sample=None if by_prompt else sample,
        dataset_row=trace.rows[k] if k < len(trace.rows) else None,
    )


def _of_step(a: Trace, stage: str, file: str, what: str, x: Any, y: Any) -> Finding:
    return Finding(step=a.step, stage=stage, file=file, what=what, a=x, b=y)


def usual_sizes(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median size of each metric, by which rounding of it is judged.

    A mean of numbers that cancel out is far below the numbers that it is made of.
    """
    sizes: dict[str, list[float]] = {}
    for line in lines:
        for name, x in line.items():
            if is_number(x) and math.isfinite(x):
                sizes.setdefault(name, []).append(abs(x))
    return {name: max(statistics.median(known), least_size(name)) for name, known in sizes.items()}


def metric_findings(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    rounding: Rounding,
    sizes: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Yield what differs between the lines of a step in metrics.jsonl, wall times aside.

    Args:
        sizes: of metrics, as they usually are.
    """
    for name in {**a, **b}:
        if name.startswith(OF_THE_WALL):
            continue
        missing = (name not in a) or (name not in b)
        if missing or not rounding.same_metric(name, a[name], b[name], sizes.get(name, 0.0)):
            note = f"only {'A' if name in a else 'B'} has it" if missing else ""
            yield Finding(
                step=a["step"],
                stage=stage_of(name, STAGE_OF_METRIC),
                file=METRICS,
                what=name,
                a=a.get(name),
                b=b.get(name),
                note=note,
            )


def stage_of(name: str, table: Mapping[str, str]) -> str:
    """Return the stage that computes a number, by its name; what users log is a metric."""
    beginnings = [start for start in table if _begins(name, start)]
    return table[max(beginnings, key=len)] if beginnings else "metric"


def _begins(name: str, start: str) -> bool:
    return name.startswith(start) and (start.endswith("/") or name[len(start) :][:1] in _ENDS)


_ENDS = ("", "_", "/", "s")


Key = tuple[int, int | None, int]  # step, prompt index, sample; or the place if these are unknown


def completions_by_step(
    lines: Sequence[Mapping[str, Any]],
) -> dict[int, dict[Key, Mapping[str, Any]]]:
    """Return the completions of each logged step by what names them, in the order of the file."""
    steps: dict[int, dict[Key, Mapping[str, Any]]] = {}
    for line in lines:
        known = steps.setdefault(line["step"], {})
        key: Key = (line["step"], None, len(known))
        if isinstance(line.get("prompt_index"), int) and isinstance(line.get("sample"), int):
            key = (line["step"], line["prompt_index"], line["sample"])
        known[key] = line
    return steps


def completion_findings(
    a: Mapping[Key, Mapping[str, Any]],
    b: Mapping[Key, Mapping[str, Any]],
    rounding: Rounding,
    fixed: frozenset[str] = frozenset(),
) -> Iterator[Finding]:
    """Yield what differs between the completions of a step that both runs have logged."""
    ours, theirs = ([key for key in one if key in other] for one, other in ((a, b), (b, a)))
    for place, (key, other) in enumerate(zip(ours, theirs, strict=True)):
        if key != other:
            yield _of_line(key, place, "data order", "order of the lines", key[1:], other[1:])
            break
    sizes = {} if rounding.is_exact else _largest_of_fields([*a.values(), *b.values()])
    for place, key in enumerate(ours):
        if a[key] != b[key]:
            yield from _line_findings(key, place, a[key], b[key], rounding, fixed, sizes)


def _largest_of_fields(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the size of the largest number of each field of some lines."""
    names = {name for line in lines for name in line}
    return {name: largest([line.get(name) for line in lines]) for name in names}


def _line_findings(
    key: Key,
    place: int,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    rounding: Rounding,
    fixed: frozenset[str],
    sizes: Mapping[str, float],
) -> Iterator[Finding]:
    for name in {**a, **b}:
        x, y = a.get(name), b.get(name)
        exact = name.removeprefix("rewards/") in fixed and name.startswith("rewards/")
        within = Rounding() if exact else rounding
        if (name in a) == (name in b) and within.same(x, y, sizes.get(name, 0.0)):
            continue
        stage = stage_of(name, STAGE_OF_FIELD)
        note = first_difference(x, y) if isinstance(x, str) and isinstance(y, str) else ""
        yield _of_line(key, place, stage, name, x, y, note)


def _of_line(
    key: Key, place: int, stage: str, what: str, x: Any, y: Any, note: str = ""
) -> Finding:
    step, index, sample = key
    row = Row(prompt_index=index, sample=sample) if index is not None else None
    return Finding(
        step=step,
        stage=stage,
        file=COMPLETIONS,
        what=what,
        a=x,
        b=y,
        row=row,
        place=place,
        note=note,
    )


def first_difference(x: str, y: str) -> str:
    """Say at which character two texts differ first."""
    pairs = itertools.zip_longest(x, y)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    return "" if at is None else f"from character {at} on"


def order_findings(a: Sequence[int], b: Sequence[int], file: str) -> Iterator[Finding]:
    """Yield where lines of steps stand in another order, of two files that have the same steps."""
    common = set(a) & set(b)
    ours, theirs = ([step for step in steps if step in common] for steps in (a, b))
    for x, y in itertools.zip_longest(ours, theirs):
        if x != y:
            steps = [step for step in (x, y) if step is not None]
            yield Finding(
                step=min(steps), stage="data order", file=file, what="order of the lines", a=x, b=y
            )
            return
