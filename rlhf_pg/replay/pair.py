"""Two runs side by side: which steps both have, and what differs in each of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from rlhf_pg.boundary.quoted import told
from rlhf_pg.replay import evidence
from rlhf_pg.replay.finding import Finding
from rlhf_pg.replay.outside_evidence import Answers, answers_by_step, outside_findings
from rlhf_pg.replay.rounding import Rounding, distance
from rlhf_pg.replay.suspects import environment
from rlhf_pg.replay.token_evidence import token_findings
from rlhf_pg.replay.weight_evidence import Saved, fingerprint_findings, saved_at, saved_findings
from rlhf_pg.report.run_files import (
    COMPLETIONS,
    METRICS,
    TRACE,
    RunFiles,
    Start,
    StepTokens,
    Trace,
    tokens_file,
)

# Makes a step of a run again and returns its tokens; None if it cannot.
Remake = Callable[[Path, int], StepTokens | None]


def opened(directory: Path) -> RunFiles:
    """Return the files of a run.

    Raises:
        ValueError: it is no directory of a run, or what it holds cannot be read.
    """
    names = ("config.yaml", METRICS, TRACE)
    if not any((directory / name).is_file() for name in names):
        raise ValueError(
            f"{directory} is not the directory of a run: it has none of {', '.join(names)}. Name "
            "what the run had as output_dir"
        )
    run, file = RunFiles(directory), "config.yaml"
    try:
        if not isinstance(run.config, dict):
            raise ValueError("it has no keys")
        file = TRACE
        for line in chain[Start | Trace](run.starts, run.traces.values()):
            _check(line)
    except (yaml.YAMLError, ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ValueError(
            f"{directory / file} cannot be read ({told(error)}): put it back from a copy, or move "
            "it away to compare without it"
        ) from error
    return run


def _check(line: Start | Trace) -> None:
    """Refuse a line of trace.jsonl that was spoiled.

    Raises:
        TypeError: a field is not what it should be.
    """
    tables = {"versions", "rewards", "altered"}
    tables |= {"weights"} if isinstance(line, Start) else set()
    for name, stored in vars(line).items():
        if name in tables and not isinstance(stored, dict):
            raise TypeError(f"{name} is no table in the line of step {line.step}")
        if isinstance(line, Start) or name in ("step", *tables):
            continue
        if not isinstance(stored, list | tuple) and (name != "values" or stored is not None):
            raise TypeError(f"{name} is no list in the line of step {line.step}")
    columns = line.rewards.values() if isinstance(line, Trace) else ()
    if any(not isinstance(column, list) for column in columns):
        raise TypeError(f"rewards have no lists in the line of step {line.step}")


@dataclass(frozen=True)
class Pair:
    """Two runs, and the rounding within which they are compared."""

    a: RunFiles
    b: RunFiles
    rounding: Rounding

    @cached_property
    def metrics(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """The lines of metrics.jsonl by step."""
        first, second = ({line["step"]: line for line in run.metrics} for run in (self.a, self.b))
        return first, second

    @cached_property
    def completions(self) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
        """The lines of completions.jsonl by step."""
        runs = (self.a, self.b)
        first, second = (evidence.completions_by_step(run.completions) for run in runs)
        return first, second

    @cached_property
    def known_steps(self) -> tuple[set[int], set[int]]:
        """The steps that each run has a line of, in metrics.jsonl or trace.jsonl."""
        runs = zip((self.a, self.b), self.metrics, strict=True)
        first, second = ({*lines, *run.traces} for run, lines in runs)
        return first, second

    @cached_property
    def saved(self) -> tuple[dict[str, int], dict[str, int]]:
        """The checkpoints, and final/, by name, with the step of each."""
        runs = zip((self.a, self.b), self.known_steps, strict=True)
        first, second = (saved_at(run, max(steps, default=0)) for run, steps in runs)
        return first, second

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The sources of reward that are functions, whose source is known."""
        starts = chain(self.a.starts, self.b.starts)
        return frozenset(
            name for start in starts for name, source in start.rewards.items() if source is not None
        )

    def steps(self) -> list[int]:
        """Return all steps of which any file says something, in order; 0 is before the first."""
        logged = (run.logged_steps() for run in (self.a, self.b))
        saved = (table.values() for table in self.saved)
        return sorted({0}.union(*self.known_steps, *self.completions, *logged, *saved))

    def findings(self, step: int) -> list[Finding]:
        """Return what differs in a step, the first first."""
        grows = self.rounding.grows
        within = self.rounding.after(self.distance(step - 1)) if grows else self.rounding
        found = chain(
            self._traced(step, within),
            fingerprint_findings(step, self.a, self.b) if self.rounding.is_exact else (),
            self._tokens(step, within),
            self._completed(step, within),
            self._answered(step, within),
            self._measured(step, within),
            self._order(step),
            self._saved(step, within),
            self._missing(step),
        )
        trace = self.a.traces.get(step)
        return sorted((_placed(one, trace) for one in found), key=lambda one: one.order)

    def weights_are_same_before(self, step: int) -> bool:
        """Return whether the weights before a step are known to be equal."""
        if not self.rounding.is_exact or step < 1:
            return False
        known = [run.traces.get(step - 1) for run in (self.a, self.b)]
        if step == 1:
            return bool(self.a.starts and self.b.starts and self.a.starts[0].weights)
        return all(trace is not None and bool(trace.weights) for trace in known)

    def distance(self, step: int) -> float:
        """Return how far the numbers of a step are apart, as a share of the largest of its kind."""
        a, b = self.a.traces.get(step), self.b.traces.get(step)
        norms = [[lines.get(step, {}).get("grad_norm")] for lines in self.metrics]
        apart = [distance(*norms)]
        if a is not None and b is not None:
            names = ("logprobs", "values", "advantages")
            apart += [distance(getattr(a, name), getattr(b, name)) for name in names]
        return max(apart)

    def _traced(self, step: int, within: Rounding) -> Iterator[Finding]:
        a, b = self.a.traces.get(step), self.b.traces.get(step)
        if a is not None and b is not None and a != b:
            yield from evidence.trace_findings(a, b, within, self.fixed)

    def _measured(self, step: int, within: Rounding) -> Iterator[Finding]:
        a, b = (lines.get(step) for lines in self.metrics)
        if a is not None and b is not None:
            yield from evidence.metric_findings(a, b, within, self._sizes)

    @cached_property
    def _sizes(self) -> dict[str, float]:
        return evidence.usual_sizes([*self.a.metrics, *self.b.metrics])

    def _completed(self, step: int, within: Rounding) -> Iterator[Finding]:
        a, b = (lines.get(step) for lines in self.completions)
        if a and b:
            yield from evidence.completion_findings(a, b, within, self.fixed)

    def _answered(self, step: int, within: Rounding) -> Iterator[Finding]:
        a, b = (answers.get(step) for answers in self._answers)
        if a and b:
            yield from outside_findings(step, a, b, within)

    @cached_property
    def _answers(self) -> tuple[dict[int, Answers], dict[int, Answers]]:
        return answers_by_step(self.a), answers_by_step(self.b)

    def _tokens(self, step: int, within: Rounding) -> Iterator[Finding]:
        runs = (self.a, self.b)
        files = [tokens_file(run.directory, step) for run in runs]
        if not all(file.is_file() for file in files):
            return
        a, b = (run.tokens(step) for run in runs)
        if a is not None and b is not None:
            yield from token_findings(step, a, b, within)
        elif (a is None) != (b is None):
            name = str(files[0].relative_to(self.a.directory))
            yield Finding(
                step=step,
                stage="sampled id",
                file=name,
                what=name,
                a=a is not None,
                b=b is not None,
                note="it cannot be read",
            )

    def _order(self, step: int) -> Iterator[Finding]:
        for file in (METRICS, COMPLETIONS, TRACE):
            if file in self._disorder and self._disorder[file].step == step:
                yield self._disorder[file]

    @cached_property
    def _disorder(self) -> dict[str, Finding]:
        """The first line of each file that stands in another order, if there is one."""
        orders = {
            METRICS: [[line["step"] for line in run.metrics] for run in (self.a, self.b)],
            COMPLETIONS: [[*lines] for lines in self.completions],
            TRACE: [[*run.traces] for run in (self.a, self.b)],
        }
        found = {file: evidence.order_findings(a, b, file) for file, (a, b) in orders.items()}
        firsts = {file: next(findings, None) for file, findings in found.items()}
        return {file: finding for file, finding in firsts.items() if finding is not None}

    def _saved(self, step: int, within: Rounding) -> Iterator[Finding]:
        runs, dropout = (self.a, self.b), self.a.config.get("disable_dropout") is False
        for name in dict.fromkeys(chain(*self.saved)):
            pair = [
                Saved(run.directory, name) if table.get(name) == step else None
                for run, table in zip(runs, self.saved, strict=True)
            ]
            if any(pair):
                yield from saved_findings(step, pair[0], pair[1], within, dropout)

    def _missing(self, step: int) -> Iterator[Finding]:
        """Yield the files in which one run has no line of a step that the other has."""
        traces = self.a.traces, self.b.traces
        tables: dict[str, Any] = {METRICS: self.metrics, TRACE: traces}
        for file, (a, b) in tables.items():
            if step == 0 or not (a and b) or (step in a) == (step in b):
                continue
            if file == TRACE and not all(environment(run, step) for run in (self.a, self.b)):
                continue  # the run was not traced when it took that step
            yield Finding(
                step=step,
                stage="length",
                file=file,
                what=f"line of step {step}",
                a=step in a,
                b=step in b,
            )
        a, b = (set(lines.get(step) or ()) for lines in self.completions)
        keys = ("log_completions_steps", "num_completions_to_print")
        alike = all(self.a.config.get(key) == self.b.config.get(key) for key in keys)
        if a and b and alike and a != b:
            yield Finding(
                step=step,
                stage="length",
                file=COMPLETIONS,
                what="number of completions that only this run has",
                a=len(a - b),
                b=len(b - a),
            )


def _placed(finding: Finding, trace: Trace | None) -> Finding:
    """Return a finding with the place that its completion has in the trace of the step."""
    row = finding.row
    if row is None or trace is None or row.sample is None or finding.file == TRACE:
        return finding
    if row.prompt_index not in trace.prompt_index:
        return finding
    place = trace.prompt_index.index(row.prompt_index) * trace.num_generations + row.sample
    return replace(finding, place=place, row=evidence.row_of(trace, place))
