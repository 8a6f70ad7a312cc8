"""`rlhf-pg diff`: the first step, and in it the first place, in which two runs differ, and why.

Every file that the runs have left is read. Names of directories and wall times do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_pg.replay.cause import Cause, cause_of, cause_of_data
from rlhf_pg.replay.finding import CONFIG, VERSION, Finding, shown_name
from rlhf_pg.replay.pair import Pair, Remake, opened
from rlhf_pg.replay.rounding import Rounding, rounding_of
from rlhf_pg.replay.suspects import (
    KeyDifference,
    config_differences,
    data_differ,
    first_other_version,
    source_differences,
)
from rlhf_pg.replay.token_evidence import token_findings
from rlhf_pg.report.run_files import COMPLETIONS, METRICS, TRACE


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: 0 is before the first.
        cause: config, library version, or a stage (`rlhf_pg.replay.finding.STAGES`).
        because: what is known about the cause, in words.
        found: the places of the first stage of the step that differ; empty if no step does.
    """

    step: int
    cause: str
    because: list[str]
    found: Sequence[Finding] = ()
    persists: bool | None = None  # whether the next step differs too; None if not known

    def shown(self, most: int = 6) -> list[Finding]:
        """Return the first place, and the first of each other kind that differs at that stage."""
        kinds: dict[tuple[str, str], Finding] = {}
        for one in self.found:
            same = one.file == TRACE and one.row is None  # tensors, of which there are many
            kinds.setdefault((one.file, "" if same else one.what), one)
        return list(kinds.values())[:most]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that comparing two runs has told.

    Attributes:
        steps: how many both have.
        difference: the first one; None if nothing differs.
        also: what else was told differently, and is not the cause.
        not_compared: what a run has not left.
    """

    a: Path
    b: Path
    steps: int
    rounding: Rounding
    difference: Difference | None = None
    also: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON types."""
        told: dict[str, Any] = {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.difference is None,
            "steps": self.steps,
            "rounding": str(self.rounding),
        }
        if (one := self.difference) is not None:
            told |= {"step": one.step, "cause": one.cause, "because": one.because}
            told |= {"stage": one.found[0].stage if one.found else one.cause}
            told |= {"found": [finding.as_json() for finding in one.found]}
        return told | {"also": self.also, "not_compared": self.not_compared}


def diff_runs(
    a: Path, b: Path, rtol: float | None = None, remake: Remake | None = None
) -> Comparison:
    """Compare two runs by the files that they have left.

    Args:
        rtol: rounding to allow; by default what `rounding_of` chooses.
        remake: makes a step again, for its tokens where a run has not kept them.

    Raises:
        ValueError: a directory is not that of a run, or cannot be read.
    """
    pair = _paired(a, b, rtol)
    keys, alone = config_differences(pair.a, pair.b)
    steps = len(pair.known_steps[0] & pair.known_steps[1])
    found = next(filter(None, (pair.findings(step) for step in pair.steps())), [])
    if found:
        cause = cause_of(found, keys, pair)
        difference: Difference | None = _first(found, cause, pair, remake)
    else:
        difference = _told_differently(keys, pair)
    because = difference.because if difference is not None else []
    lonely = [f"only one run has the key {shown_name(key)}" for key in alone]
    return Comparison(
        a=a,
        b=b,
        steps=steps,
        rounding=pair.rounding,
        difference=difference,
        also=[str(key) for key in keys if str(key) not in because] + lonely,
        not_compared=_not_compared(pair),
    )


def _paired(a: Path, b: Path, rtol: float | None) -> Pair:
    first, second = opened(a), opened(b)
    return Pair(first, second, rounding_of(first, second, rtol))


def _first(found: list[Finding], cause: Cause, pair: Pair, remake: Remake | None) -> Difference:
    first = found[0]
    same = [one for one in found if (one.stage, one.before) == (first.stage, first.before)]
    # Of the same completion, what names the token tells most.
    same.sort(key=lambda one: (one.place, one.token is None))
    if remake is not None and not any(one.token is not None for one in same):
        same = _with_token(same, pair, remake)
    next_step = first.step + 1
    known = all(next_step in steps for steps in pair.known_steps) and pair.rounding.is_exact
    return Difference(
        step=first.step,
        cause=cause.word,
        because=cause.lines,
        found=same,
        persists=bool(pair.findings(next_step)) if known else None,
    )


def _with_token(same: list[Finding], pair: Pair, remake: Remake) -> list[Finding]:
    """Put the first token that differs in front, from tokens that are kept or made again."""
    first = same[0]
    if first.row is None or first.step < 1:
        return same
    made = [run.tokens(first.step) or remake(run.directory, first.step) for run in (pair.a, pair.b)]
    if made[0] is None or made[1] is None:
        return same
    tokens = token_findings(first.step, made[0], made[1], pair.rounding)
    named = [
        replace(one, file="the step made again", row=first.row)
        for one in tokens
        if one.stage == first.stage and one.row is not None
        if (one.row.prompt_index, one.row.sample) == (first.row.prompt_index, first.row.sample)
    ]
    return [*named, *same]


def _told_differently(keys: list[KeyDifference], pair: Pair) -> Difference | None:
    """Return what differs in what two runs were told, where no step does."""
    agree = "every step agrees"
    if [key.key for key in keys] == ["dataset_fingerprint"]:
        return Difference(step=0, cause=cause_of_data(pair), because=[*map(str, keys), agree])
    if keys:
        return Difference(step=0, cause=CONFIG, because=[*map(str, keys), agree])
    if (version := first_other_version(pair.a, pair.b)) is not None:
        return Difference(step=version[0], cause=VERSION, because=[*version[1], agree])
    for step in sorted({start.step for run in (pair.a, pair.b) for start in run.starts}):
        if sources := source_differences(pair.a, pair.b, step + 1):
            return Difference(step=step, cause="reward", because=[*sources.values(), agree])
    return None


def _not_compared(pair: Pair) -> list[str]:
    """Return what a run lacks, with what could therefore not be compared."""
    runs = {"A": pair.a, "B": pair.b}
    meaning = {
        METRICS: "rewards, losses and gradient norms of the steps",
        TRACE: "rows, ids, scores, advantages and weights of every step",
        "config.yaml": "keys of the config",
        COMPLETIONS: "texts of completions",
    }
    said = []
    for file, what in meaning.items():
        lacking = [name for name, run in runs.items() if not (run.directory / file).is_file()]
        if lacking:
            said.append(f"{' and '.join(lacking)} without {file}: {what} were not compared")
    logged = [set(run.logged_steps()) for run in runs.values()]
    if any(logged) and not logged[0] & logged[1]:
        said.append("no step has its tokens kept in both runs: no single tokens were compared")
    if not (pair.saved[0].keys() & pair.saved[1].keys()):
        said.append("no checkpoint and no final/ in both runs: no saved weights were compared")
    if data_differ(pair.a, pair.b) is None and all(run.config for run in runs.values()):
        said.append("no dataset_fingerprint in both runs: the data were compared as they were used")
    return said
