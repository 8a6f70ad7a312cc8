"""Batches that are sampled and scored beside the updates of earlier steps (`rollout_ahead`).

With rollout_ahead k, the batch of step n is sampled by the weights after step n - k, or by the
first ones. Only the numbers of the steps decide this, so a run can be repeated, and resumed from a
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

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState

from rlhf_pg.boundary.output_files import sync, write_file
from rlhf_pg.boundary.user_code import call_beside
from rlhf_pg.data import Batch, Prompts
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import RolloutError
from rlhf_pg.rollout.engine import Copied
from rlhf_pg.runtime import Runtime, RuntimeBeside
from rlhf_pg.trainers.sampler import Sampler, gathered_for

# Columns of a batch that JSON can hold; `columns` are read again from the dataset.
TOTALS = ("num_prompts", "other_tokens", "metrics", "logged_metrics")
IN_JSON = ("prompts", "completions", "dataset_rows", "logged", *TOTALS)
GREEDY = "greedy."
SLICE = 10.0  # seconds for which a process waits before it says that it does not hang


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The batch of a step, sampled or not."""

    step: int  # counted from 0
    version: int  # the steps that its weights have taken
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
        beside = RuntimeBeside(runtime)
        self.sampler = dataclasses.replace(sampler, runtime=beside, policy=None, pending={})
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
            self.last = call_beside(None, self._sample, number, *how)
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
        """Sample the batch of a step, after the one before it, and whatever was begun last."""
        wait(filter(None, [last]))
        if before is not None:
            first = before.result()[1]
        if dropped.is_set():
            raise RolloutError("the batch was dropped")
        meter = Meter()
        sampler = self.sampler
        sampler.progress = partial(self.progress, step, first)
        with sampler.sampling(copied):
            batch = sampler.next_batch(first, meter)
        return batch, first + batch.num_prompts, meter.seconds

    def drain(self, count: int | None = None) -> None:
        """Wait for the batches under way, or the first of them, whether or not they fail."""
        jobs = {job.done for job in list(self.queue)[:count]}
        watch = self.runtime.watch
        if count is None and self.last is not None:
            jobs.add(self.last)  # it may have been dropped
        while jobs:  # it ends in time if another process fails, but works and does not hang
            with nullcontext() if watch is None else watch.waiting("rollout_ahead"):
                jobs = wait(jobs, SLICE).not_done

    def drop(self) -> None:
        """Forget the batches ahead; one that is being sampled is not waited for."""
        for job in self.queue:
            job.dropped.set()
        self.queue.clear()

    # ------------------------------------------------------------------------------- checkpoints

    def save(self, directory: Path, rank: int, step: int) -> None:
        """Write the batches of the steps from `step` on, as far as none has failed."""
        ahead = [job for job in self.queue if job.step >= step]
        jobs = list(takewhile(lambda job: job.done.exception() is None, ahead))
        tensors = dict[str, Tensor]()
        facts = []
        for i, job in enumerate(jobs):
            batch, end, seconds = job.done.result()
            columns, packed = pack(batch)
            tensors |= {f"{i}.{name}": column for name, column in columns.items()}
            fact = {
                "step": job.step,
                "version": job.version,
                "end": end,
                "seconds": seconds,
                "batch": packed,
            }
            facts.append(fact)
        file = directory / f"ahead-rank{rank}.safetensors"
        save_file(tensors, file)
        sync(file)  # the main process may be on another machine
        write_file(
            file.with_suffix(".json"),
            [json.dumps(facts, default=str).encode()],
        )

    def restore(self, directory: Path) -> None:
        """Read the batches of a checkpoint; if the number of processes has changed, their rows are
        shared out anew.
        """
        self.drop()
        count = len(list(directory.glob("ahead-rank*.json")))
        same = count == self.runtime.world
        ranks = [self.runtime.rank] if same else range(count)
        files = [directory / f"ahead-rank{rank}.safetensors" for rank in ranks]
        prompts = self.sampler.prompts
        device = self.runtime.device
        for parts in zip(
            *(read(file, prompts, device) for file in files),
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

    def _share(self, parts: Sequence[Batch]) -> Batch:
        """Return this process's rows of a batch."""
        pad = self.sampler.tokenizer.pad_token_id
        totals = {name: getattr(parts[0], name) for name in TOTALS}
        together = Batch.concat(parts, pad)
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


def pack(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a batch, and its other columns for JSON."""
    tensors = {name: x.cpu().contiguous() for name, x in vars(batch).items() if torch.is_tensor(x)}
    packed = {name: getattr(batch, name) for name in IN_JSON}
    packed["episodes"] = [{"turns": x.turns, "error": x.error} for x in batch.episodes]
    if batch.greedy is not None:
        of_greedy, packed["greedy"] = pack(batch.greedy)
        tensors |= {GREEDY + name: column for name, column in of_greedy.items()}
    return tensors, packed


def unpack(
    tensors: Mapping[str, Tensor],
    packed: dict[str, Any],
    prompts: Prompts,
) -> Batch:
    """Reverse `pack`."""
    fields = dict[str, Any]()
    of_greedy = {}
    for name, column in tensors.items():
        if name.startswith(GREEDY):
            of_greedy[name.removeprefix(GREEDY)] = column
        else:
            fields[name] = column
    if of_greedy:
        fields["greedy"] = unpack(of_greedy, packed.pop("greedy"), prompts)
    columns = prompts.rows[packed["dataset_rows"]]
    columns.pop("prompt", None)
    packed["episodes"] = [SimpleNamespace(**x) for x in packed["episodes"]]
    return Batch(**fields, **packed, columns=columns)


def read(file: Path, prompts: Prompts, device: torch.device) -> list[tuple[dict[str, Any], Batch]]:
    """Return what `save` wrote: numbers and batch of each step."""
    facts = json.loads(file.with_suffix(".json").read_text())
    tensors: list[dict[str, Tensor]] = [{} for _ in facts]
    for name, column in load_file(file).items():
        number, _, field_name = name.partition(".")
        tensors[int(number)][field_name] = column.to(device)
    steps = []
    for fact, columns in zip(facts, tensors, strict=True):
        steps.append((fact, unpack(columns, fact.pop("batch"), prompts)))
    return steps
