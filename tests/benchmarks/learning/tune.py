"""The best settings of a side: its learning rate, and how many completions TRL computes at once."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.learning.job import Job, ensure, lines
from tests.benchmarks.learning.summary import Run, to_score

SEED = 1000  # of no run that is measured
FACTORS = (0.5, 1.0, 2.0)  # of the learning rate


class Settings:
    """The choices so far, by task, method and side, kept in a file."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "settings.json"
        text = self.path.read_text() if self.path.exists() else "{}"
        self.chosen: dict[str, dict[str, Any]] = json.loads(text)

    def applied(self, job: Job) -> Job:
        """The job with what has been chosen for it, if anything has."""
        return replace(job, **self.chosen.get(job.group, {}))

    def choose(self, job: Job, batches: list[int], score: float) -> None:
        """Choose for the job's task, method and side, unless that was done before."""
        if job.group in self.chosen:
            return
        job = replace(job, seed=SEED)
        if job.side == "trl" and len(batches) > 1:
            job = replace(job, batch=min(batches, key=lambda batch: self._seconds(job, batch)))
        rate = max(
            (factor * job.learning_rate for factor in FACTORS),
            key=lambda rate: self._merit(replace(job, learning_rate=rate), score),
        )
        self.chosen[job.group] = {"learning_rate": rate, "batch": job.batch}
        self.path.write_text(json.dumps(self.chosen, indent=1))

    def _seconds(self, job: Job, batch: int) -> float:
        """Of a step with so many completions at a time; the first of three warms up."""
        samples = 3 * job.subject.prompts * job.subject.n
        short = replace(job, batch=batch, samples=samples, every=0)
        run = lines(ensure(short, self.directory / "tune" / f"batch-{batch}"))
        return statistics.mean(line["step_seconds"] for line in run if line.get("step", 1) > 1)

    def _merit(self, job: Job, score: float) -> tuple[float, float]:
        """Fewer samples to the score are better, then a higher last score."""
        run = lines(ensure(job, self.directory / "tune" / f"rate-{job.learning_rate:g}"))
        curve = Run.of(run).curve
        return -to_score(curve, score).samples, curve[-1].score
