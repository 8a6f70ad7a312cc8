"""A step of a run, made again from the checkpoint before it.

Noise is a function of (seed, draw, sample, position), updates do not depend on the clock, and
checkpoints are exact, so nothing but the run directory is needed; what others answered is in
`outside.jsonl`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.checkpointer import STATE
from rlhf_pg.report.json_lines import JsonLines
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import (
    COMPLETIONS,
    METRICS,
    OUTSIDE,
    TRACE,
    RunFiles,
    Trace,
    tokens_file,
    whole_lines,
)
from rlhf_pg.trainers import PolicyGradientTrainer
from rlhf_pg.trainers.loop import due
from rlhf_pg.trainers.recorder import StepRecord
from rlhf_pg.trainers.samples import ScoredBatch


@dataclass(frozen=True, kw_only=True)
class Made:
    """A step that was made again.

    Attributes:
        metrics: the line of the step for metrics.jsonl, with the times of now.
        record: what the step did; complete on the main process alone.
        differs: what is not as the run recorded it, in the order in which it came about.
    """

    metrics: Mapping[str, Any]
    record: StepRecord
    differs: Sequence[str] = ()

    @property
    def step(self) -> int:
        return self.record.trace.step


class Replay:
    """The steps of a run, made again by a trainer that is built as the run's was.

    It takes steps in ascending order, writes nothing into the run directory, and calls no callback.
    All methods are collective.

    Args:
        trainer: has the run's config and is given what the run was given in Python. Its
            `output_dir` is the run's.
        run: the files of the run; by default those in `output_dir`.

    Raises:
        ValueError: there is no run, or it began from other weights than the trainer's.
    """

    def __init__(self, trainer: PolicyGradientTrainer, run: RunFiles | None = None) -> None:
        self.trainer = trainer
        self.run = RunFiles(Path(trainer.args.output_dir)) if run is None else run
        if not self.run.metrics:
            raise ValueError(f"{self.run.directory} holds no run: it has no line in {METRICS}")
        self._asked: dict[int, list[dict[str, Any]]] = {}
        for line in whole_lines(self.run.directory / OUTSIDE):
            self._asked.setdefault(line["step"], []).append(line)
        trainer.learner.skipped.keeps = False
        trainer.on_resume(self.run.config)
        self._check_start()

    @property
    def last(self) -> int:
        """The last step that the run took."""
        return int(self.run.metrics[-1]["step"])

    def make(self, step: int) -> Made:
        """Make a step again, counted from 1.

        Raises:
            ValueError: the run did not take it, or the trainer is beyond it and there is no
                checkpoint to go back to.
        """
        self.go_to(step - 1)
        trainer = self.trainer
        trainer.records_all = True
        try:
            metrics = self._take(step)
        finally:
            trainer.records_all = False
        if self._evaluates(step):
            metrics |= trainer.evaluate()
        assert trainer.latest is not None
        record = trainer.latest
        return Made(metrics=metrics, record=record, differs=self._differs(metrics, record.trace))

    def steps(self, first: int, last: int) -> Iterator[Made]:
        """Make the steps from the first to the last."""
        for step in range(first, last + 1):
            yield self.make(step)

    def go_to(self, step: int) -> None:
        """Bring the trainer to where it was after a step."""
        began = self.run.starts[0].step if self.run.starts else 0
        if not began <= step < self.last:
            raise ValueError(
                f"the run took steps {began + 1} to {self.last}: step {step + 1} is none of them"
            )
        trainer, found = self.trainer, self._checkpoint(step)
        now = trainer.state.step
        if found is not None and (now > step or found[0] > now):
            trainer.on_resume(trainer.checkpointer.restore(found[1], trainer.runtime.rank))
        elif now > step:
            raise ValueError(
                f"the trainer has taken {now} steps, and there is no checkpoint before step "
                f"{step + 1} to go back to: make a new one"
            )
        elif now < began:
            raise ValueError(
                f"the run went on from a checkpoint of step {began} that is not there "
                "(resume_from_checkpoint), and has none of its own before "
                f"step {step + 1}: put one back"
            )
        while trainer.state.step < step:
            self._take(trainer.state.step + 1)

    def collect(self, step: int) -> ScoredBatch:
        """Make the first half of the next step again: completions with their scores."""
        trainer = self.trainer
        with self._answered(step), torch.no_grad():
            return trainer.collector.collect(trainer.state.prompt_index, Meter())

    def _take(self, step: int) -> dict[str, Any]:
        with self._answered(step):
            return self.trainer.step(Meter())

    @contextmanager
    def _answered(self, step: int) -> Iterator[None]:
        """Have those who were asked in a step answer as they did."""
        trainer = self.trainer
        asked = self._asked.get(step)
        others = [s.name for s in trainer.rewards.sources if s.place == "event loop"]
        if asked is None and others:
            raise ValueError(
                f"{self.run.directory / OUTSIDE} has nothing of step {step}, in which "
                f"{', '.join(others)} was asked: it cannot be made again"
            )
        trainer.collector.recorded = asked
        try:
            yield
        finally:
            trainer.collector.recorded = None

    def _checkpoint(self, step: int) -> tuple[int, Path] | None:
        """Return the newest whole checkpoint of at most this step, and its step."""
        places = [*(self.run.directory / "checkpoints").glob("step-*"), self.run.directory / "best"]
        places += [Path(self.trainer.args.resume_from_checkpoint or "latest")]  # of another run
        sealed = {place: atomic.facts(place).get("step", -1) for place in places}
        for place in sorted(places, key=lambda place: sealed[place], reverse=True):
            if 0 < sealed[place] <= step and (place / STATE).is_file():
                reason = atomic.verified(place, contents=self.trainer.runtime.is_main)
                if self.trainer.runtime.first_error(reason) is None:
                    return sealed[place], place
        return None

    def _check_start(self) -> None:
        """Refuse weights that are not those that the run began with.

        Raises:
            ValueError: a tensor differs, which is named.
        """
        trainer = self.trainer
        if trainer.state.step or not self.run.starts or self.run.starts[0].step:
            return
        began, now = self.run.starts[0], trainer.began()
        if trainer.runtime.splits or began.backend != now.backend:
            return  # of shards, these depend on how they were split
        for name, number in began.weights.items():
            if now.weights.get(name) != number:
                raise ValueError(
                    f"the run began from other weights: {name} was {number} and is "
                    f"{now.weights.get(name, 'not there')}. Give the model as it was then"
                )

    def _evaluates(self, step: int) -> bool:
        """Return whether the run evaluated after a step, in a way that can be done again."""
        trainer = self.trainer
        asks = bool(trainer.rewards.kept) or trainer.collector.episode_runner is not None
        return due(step, trainer.args.eval_steps) and bool(trainer.eval_sets) and not asks

    def _differs(self, metrics: Mapping[str, Any], made: Trace) -> list[str]:
        """Say what is not as it was recorded."""
        differs = []
        recorded = self.run.traces.get(made.step)
        if recorded is not None:
            fields = ("rows", "prompts", "ids", "logprobs", "rewards", "values", "advantages")
            differs = [name for name in fields if getattr(made, name) != getattr(recorded, name)]
            if made.weights != list(recorded.weights):
                differs.append("weights")
            # Which tokens are sampled together depends on drafts and on when environments answer.
            collector = self.trainer.collector
            drafts = getattr(collector.engine, "history", None) is not None
            timed = drafts or collector.episode_runner is not None
            if timed and differs == ["logprobs"] and _close(made.logprobs, recorded.logprobs):
                differs = []
        line = next((one for one in self.run.metrics if one["step"] == made.step), {})
        for key in ("loss", "grad_norm"):
            if line.get(key) is not None and line[key] != metrics[key]:
                differs.append(key)
        return differs


def _close(found: Sequence[float | None], known: Sequence[float | None]) -> bool:
    """Return whether sums of log-probabilities differ by rounding at most."""
    pairs = zip(found, known, strict=True)
    return all(a == b or math.isclose(a or 0.0, b or 0.0, rel_tol=1e-5) for a, b in pairs)


def save(made: Sequence[Made], directory: Path) -> None:
    """Write steps as a run leaves them: metrics, completions, tokens and traces."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: JsonLines(directory / name, 0) for name in (METRICS, COMPLETIONS, TRACE)}
    for one in made:
        files[METRICS].write(dict(one.metrics))
        files[TRACE].write(vars(one.record.trace))
        files[COMPLETIONS].write_all({"step": one.step, **said} for said in one.record.completions)
        if one.record.tokens is not None:
            one.record.tokens.save(tokens_file(directory, one.step))
