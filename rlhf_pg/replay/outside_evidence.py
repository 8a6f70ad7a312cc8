"""Differences in what others answered in a step: judges, servers, environments, tools."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_pg.replay.finding import Finding, Row
from rlhf_pg.replay.rounding import Rounding
from rlhf_pg.report.run_files import OUTSIDE, RunFiles, whole_lines

EPISODE = "episode"  # the source of the answers of environments and tools
Asked = tuple[str, int, int, int]  # source, call, prompt index, sample
Answers = dict[Asked, Any]


def answers_by_step(run: RunFiles) -> dict[int, Answers]:
    """Return what others answered in each step, by who was asked about what."""
    steps: dict[int, Answers] = {}
    for line in whole_lines(run.directory / OUTSIDE):
        call, index, sample = (line.get(key) for key in ("call", "prompt_index", "sample"))
        if isinstance(call, int) and isinstance(index, int) and isinstance(sample, int):
            asked = (str(line.get("source")), call, index, sample)
            steps.setdefault(line["step"], {})[asked] = line.get("answer")
    return steps


def outside_findings(step: int, a: Answers, b: Answers, rounding: Rounding) -> Iterator[Finding]:
    """Yield the questions of a step to which both runs had an answer, and not the same one."""
    for place, asked in enumerate(asked for asked in a if asked in b):
        x, y = a[asked], b[asked]
        if x == y or _same_score(x, y, rounding):
            continue
        source, _, index, sample = asked
        yield Finding(
            step=step,
            stage="sampled id" if source == EPISODE else "reward",
            file=OUTSIDE,
            what=f"answer of {source}",
            a=x,
            b=y,
            row=Row(prompt_index=index, sample=sample),
            place=place,
        )


def _same_score(x: Any, y: Any, rounding: Rounding) -> bool:
    """Return whether two answers are nothing but scores, which are apart by rounding."""
    if not (isinstance(x, Mapping) and isinstance(y, Mapping)):
        return False
    return x.keys() == y.keys() == {"score"} and rounding.same(x["score"], y["score"])
