"""Batches that are sampled and scored during the updates of earlier steps (`rollout_ahead`).

With rollout_ahead k, the batch of step n is sampled by the weights after step n - k, or by the
initial ones. This depends only on the step numbers, so a run can be repeated, and resumed from a
checkpoint, which holds the batches ahead of its step.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.user_code import call_concurrently
from rlhf_pg.data import Batch
from rlhf_pg.data.row_files import StepTokens, records_of
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import RolloutError
from rlhf_pg.rollout.engine import Copied
from rlhf_pg.runtime import Runtime, ThreadRuntime
from rlhf_pg.trainers.sampler import Sampler, gathered_for

# Columns of a batch that JSON can hold; `columns` are read again from the dataset.
TOTALS = ("num_prompts", "other_tokens", "metrics", "logged_metrics")
IN_JSON = ("prompts", "completions", "dataset_rows", "logged", *TOTALS)
GREEDY = "greedy."
SLICE = 10.0  # seconds that a process waits before it reports that it is not hanging


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The batch of a step, sampled or not."""

    step: int  # counted from 0
    version: int  # steps that its weights have been trained for
    done: "Future[tuple[Batch, int, dict[str, float]]]"  # the batch, the prompt after it, seconds
    dropped: Event = field(default_factory=Event)  # set if the batch is not wanted any more


class Ahead:
    """Samples the batches of the next `depth` steps, one after another, in threads.

    `next` and `restore` are collective.
    """

    def __init__(
        self,
        sampler: Sampler,
        depth: int,
        runtime: Runtime,
        progress: Callable[[int, int], TrainerState],
    ) -> None:
        self.depth = depth
        self.policy = sampler.policy
        self.runtime = runtime
        self.progress = progress
        thread_runtime = ThreadRuntime(runtime)
        self.sampler = dataclasses.replace(sampler, runtime=thread_runtime, policy=None, pending={})
        self.queue: deque[Job] = deque()
        self.last: Future[Any] | None = None  # begun

    def next(self, step: int, first: int, last: int, meter: Meter) -> Batch:
        """Return the batch of a step, and begin those of later steps.

        Args:
            first: the index of the step's first prompt.
            last: the number of steps of the run.

        Raises:
            RolloutError, ValueError: as `Sampler.next_batch`; the batches ahead are then dropped.
        """
        while self.queue and self.queue[0].step < step:
            self.queue.popleft()
        copied: Copied | None = None
        end = min(max(last, step + 1), step + self.depth + 1)
        while (number := step + len(self.queue)) < end:
            copied = copied or self._copy()
            before = self.queue[-1].done if self.queue else None
            dropped = Event()
            how = first, before, self.last, copied, dropped
            self.last = call_concurrently(None, self._sample, number, *how)
            self.queue.append(
                Job(
                    step=number,
                    version=step,
                    done=self.last,
                    dropped=dropped,
                )
            )
        job = self.queue[0]
        with meter.time("wait"):
            self.drain(1)
        try:
            batch, _, seconds = job.done.result()
        except BaseException:
            self.drop()
            raise
        meter.seconds |= seconds
        staleness = {"sampling/staleness": float(step - job.version)}
        return batch.with_columns(metrics=batch.metrics | staleness)

    def _copy(self) -> Copied:
        """Copy the policy's weights."""
        engine = self.sampler.engine
        runtime = self.runtime
        whole = gathered_for(engine, self.policy, runtime.device)
        with runtime.raise_together(RolloutError), whole:
            return engine.copy_weights()

    def _sample(
        self,
        step: int,
        first: int,
        before: "Future[tuple[Batch, int, dict[str, float]]] | None",
        last: "Future[Any] | None",
        copied: Copied,
        dropped: Event,
    ) -> tuple[Batch, int, dict[str, float]]:
        """Sample the batch of a step, once the one before it and the last one begun are done."""
        wait(filter(None, [last]))
        if before is not None:
            first = before.result()[1]
        if dropped.is_set():
            raise RolloutError("the batch was dropped")
        meter = Meter()
        sampler = self.sampler
        sampler.progress = partial(self.progress, step, first)
        batch = sampler.next_batch(first, meter, copied)
        return batch, first + batch.num_prompts, meter.seconds

    def drain(self, count: int | None = None) -> None:
        """Wait for the batches under way, or the first of them, whether or not they fail."""
        jobs = {job.done for job in list(self.queue)[:count]}
        watch = self.runtime.watch
        if count is None and self.last is not None:
            jobs.add(self.last)  # it may have been dropped
        while jobs:  # ends soon if another process fails, but is not taken for a hang
            with nullcontext() if watch is None else watch.waiting("rollout_ahead"):
                jobs = wait(jobs, SLICE).not_done

    def drop(self) -> None:
        """Forget the batches ahead; one that is being sampled is not waited for."""
        for job in self.queue:
            job.dropped.set()
        self.queue.clear()

    # ------------------------------------------------------------------------------- checkpoints

    def save(self, directory: Path, rank: int, step: int) -> None:
        """Write the batches of the steps from `step` on, up to the first that has failed."""
        ahead = [job for job in self.queue if job.step >= step]
        jobs = list(takewhile(lambda job: job.done.exception() is None, ahead))
        facts = []
        for i, job in enumerate(jobs):
            batch, end, seconds = job.done.result()
            fact = {
                "step": job.step,
                "version": job.version,
                "end": end,
                "seconds": seconds,
                "batch": write(batch, rows_file(directory, rank, i)),
            }
            facts.append(fact)
        lines = [json.dumps(facts, default=str).encode()]
        write_file(directory / f"ahead-rank{rank}.json", lines)

    def restore(self, directory: Path) -> None:
        """Read the batches of a checkpoint; if the number of processes has changed, their rows are
        shared out anew.
        """
        self.drop()
        count = len(list(directory.glob("ahead-rank*.json")))
        same = count == self.runtime.world
        ranks = [self.runtime.rank] if same else range(count)
        for parts in zip(
            *(self._read(directory, rank) for rank in ranks),
            strict=True,
        ):
            fact, batch = parts[0]
            if not same:
                batch = self._share([part for _, part in parts])
            done: Future[Any] = Future()
            done.set_result((batch, fact["end"], fact["seconds"]))
            self.queue.append(
                Job(
                    step=fact["step"],
                    version=fact["version"],
                    done=done,
                )
            )

    def _read(self, directory: Path, rank: int) -> list[tuple[dict[str, Any], Batch]]:
        """Return what `save` wrote for a process: numbers and batch of each step."""
        facts = json.loads((directory / f"ahead-rank{rank}.json").read_text())
        tables = [rows_file(directory, rank, i) for i in range(len(facts))]
        older = directory / f"ahead-rank{rank}.safetensors"  # of 0.1.0
        columns = load_file(older) if older.exists() else {}
        steps = []
        for i, (fact, file) in enumerate(zip(facts, tables, strict=True)):
            packed = fact.pop("batch")
            batch = self._batch(packed, file, under(f"{i}.", columns))
            steps.append((fact, batch))
        return steps

    def _batch(
        self,
        packed: dict[str, Any],
        file: Path,
        columns: dict[str, Tensor],
    ) -> Batch:
        """Reverse `write`; `columns` are the tensors of a batch of 0.1.0, padded."""
        greedy = None
        if packed.get("greedy"):
            of_greedy = {
                k.removeprefix(GREEDY): x for k, x in columns.items() if k.startswith(GREEDY)
            }
            greedy = self._batch(packed["greedy"], greedy_file(file), of_greedy)
        if columns:
            tensors: Any = {name: x for name, x in columns.items() if not name.startswith(GREEDY)}
            table = table_of(Batch(**tensors), packed["dataset_rows"])
        else:
            table = StepTokens.load(file)
        indices = range(len(table.lengths))
        recorded = table.rows(indices)
        prompts = self.sampler.prompts.take(
            [row.dataset_row for row in recorded],
            [row.group for row in recorded],
        )
        rows = []
        for i, (row, prompt) in enumerate(zip(recorded, prompts, strict=True)):
            episodes = packed["episodes"]
            row = dataclasses.replace(
                row,
                prompt=packed["prompts"][i],
                completion=packed["completions"][i],
                columns=prompt.columns(),
                episode=SimpleNamespace(**episodes[i]) if episodes else None,
                logged={name: column[i] for name, column in packed["logged"].items()},
            )
            rows.append(row)
        batch = self.sampler.batch_of(rows, table.scores.shape[1])
        return batch.with_columns(greedy=greedy, **{name: packed[name] for name in TOTALS})

    def _share(self, parts: Sequence[Batch]) -> Batch:
        """Return this process's rows of a batch."""
        totals = {name: getattr(parts[0], name) for name in TOTALS}
        together = Batch.concat(parts)
        groups = together.groups.tolist()
        of_rank = set(self.sampler.share(sorted(set(groups))))
        batch = together.pick(
            [i for i, group in enumerate(groups) if group in of_rank],
            **totals,
        )
        greedy = [part.greedy for part in parts if part.greedy is not None]
        if greedy:
            return batch.with_columns(greedy=self._share(greedy))
        return batch


def under(prefix: str, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns whose names begin with a prefix, by the names after it."""
    return {
        name.removeprefix(prefix): column
        for name, column in columns.items()
        if name.startswith(prefix)
    }


def rows_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"ahead-rank{rank}-{number}.safetensors"


def greedy_file(file: Path) -> Path:
    return file.with_stem(f"{file.stem}-greedy")


def table_of(batch: Batch, dataset_rows: Sequence[int]) -> StepTokens:
    """Return the rows of a batch as a file holds them."""
    numbers = {"sampler_logprob": batch.sampler_logprobs}
    if batch.branches is not None:
        numbers["line"] = batch.branches.double()
    return StepTokens.of(*records_of(batch, numbers, dataset_rows))


def write(batch: Batch, file: Path) -> dict[str, Any]:
    """Write the rows of a batch, and return its other columns for JSON."""
    table_of(batch, batch.dataset_rows).save(file)
    packed = {name: getattr(batch, name) for name in IN_JSON}
    packed["episodes"] = [{"turns": x.turns, "error": x.error} for x in batch.episodes]
    if batch.greedy is not None:
        packed["greedy"] = write(batch.greedy, greedy_file(file))
    return packed
