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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerState

from rlhf_pg.boundary.user_code import call_beside
from rlhf_pg.data import Batch, Prompts
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import RolloutError
from rlhf_pg.runtime import Runtime, RuntimeBeside
from rlhf_pg.runtime.termination import waits
from rlhf_pg.trainers.sampler import Sampler

# Columns of a batch that JSON can hold; `columns` are read again from the dataset.
TOTALS = ("num_prompts", "other_tokens", "metrics", "logged_metrics")
LISTS = ("prompts", "completions", "dataset_rows", "logged", *TOTALS)
GREEDY = "greedy."


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The batch of a step, sampled or not."""

    step: int  # counted from 0
    version: int  # the number of steps behind the weights that sample it
    done: "Future[tuple[Batch, int, dict[str, float]]]"  # the batch, the prompt after it, seconds


class Ahead:
    """Samples the batches of the next `depth` steps in a thread; all methods are collective."""

    def __init__(
        self,
        sampler: Sampler,
        depth: int,
        runtime: Runtime,
        progress: Callable[[int, int], TrainerState],
    ) -> None:
        self.depth, self.policy, self.runtime = depth, sampler.policy, runtime
        self.progress, self.watch = progress, runtime.watch
        beside = RuntimeBeside(runtime)
        self.sampler = dataclasses.replace(sampler, runtime=beside, policy=None, begun={})
        self.queue: deque[Job] = deque()

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
        end = max(last, step + 1)
        while len(self.queue) <= self.depth and (number := step + len(self.queue)) < end:
            assert self.policy is not None
            with (
                self.runtime.raise_together(RolloutError),
                self.policy.gathered(self.runtime.device),
            ):
                copied = self.sampler.engine.copy_weights()
            before = self.queue[-1].done if self.queue else None
            done = call_beside(None, self._sample, number, first, before, copied)
            self.queue.append(Job(step=number, version=step, done=done))
        job = self.queue[0]
        with meter.time("wait"):
            self.drain(1)
        try:
            batch, _, seconds = job.done.result()
        except BaseException:
            self.queue.clear()
            raise
        meter.seconds |= seconds
        staleness = {"sampling/staleness": float(step - job.version)}
        return batch.with_columns(metrics=batch.metrics | staleness)

    def _sample(
        self,
        step: int,
        first: int,
        before: "Future[tuple[Batch, int, dict[str, float]]] | None",
        copied: AbstractContextManager[None],
    ) -> tuple[Batch, int, dict[str, float]]:
        """Sample the batch of a step, after the one before it."""
        if before is not None:
            first = before.result()[1]
        meter, sampler = Meter(), self.sampler
        sampler.progress = partial(self.progress, step, first)
        with ExitStack() as weights:
            # No process samples before all are here: one may update the server for all.
            with sampler.runtime.raise_together(RolloutError):
                weights.enter_context(sampler.engine.weights_synced(copied))
            batch = sampler.next_batch(first, meter)
        return batch, first + batch.num_prompts, meter.seconds

    @waits
    def drain(self, count: int | None = None) -> None:
        """Wait for the batches under way, or the first of them, whether or not they fail."""
        wait([job.done for job in list(self.queue)[:count]])

    # ------------------------------------------------------------------------------- checkpoints

    def save(self, directory: Path, rank: int, step: int) -> None:
        """Write the batches of the steps from `step` on, as far as none has failed."""
        ahead = [job for job in self.queue if job.step >= step]
        jobs = list(takewhile(lambda job: job.done.exception() is None, ahead))
        tensors, facts = dict[str, Tensor](), []
        for i, job in enumerate(jobs):
            batch, end, seconds = job.done.result()
            own, rest = pack(batch)
            tensors |= {f"{i}.{name}": value for name, value in own.items()}
            facts.append({"version": job.version, "step": job.step, "end": end, "batch": rest})
            facts[-1]["seconds"] = seconds
        save_file(tensors, _file(directory, rank), {"jobs": json.dumps(facts, default=str)})

    def restore(self, directory: Path) -> None:
        """Read the batches of a checkpoint; other processes than it has share them out anew."""
        rank, world, sampler = self.runtime.rank, self.runtime.world, self.sampler
        files = sorted(directory.glob("ahead-rank*"), key=lambda path: (len(path.name), path.name))
        saved = [read(path, sampler.prompts, self.runtime.device) for path in files]
        jobs = saved[rank] if len(saved) == world else []
        if len(saved) != world:
            for parts in zip(*saved, strict=True):
                batches = [batch for _, (batch, *_) in parts]
                facts, (_, *rest) = parts[0]
                jobs.append((facts, (self._share(batches), *rest)))
        self.queue.clear()
        for facts, result in jobs:
            done: Future[Any] = Future()
            done.set_result(result)
            self.queue.append(Job(**facts, done=done))

    def _share(self, parts: Sequence[Batch]) -> Batch:
        """Return this process's rows of a batch."""
        pad = self.sampler.tokenizer.pad_token_id
        totals = {name: getattr(parts[0], name) for name in TOTALS}
        together = Batch.concat(parts, pad)
        groups = together.groups.tolist()
        own = set(self.sampler.share(sorted(set(groups))))
        batch = together.pick([i for i, group in enumerate(groups) if group in own], **totals)
        greedy = [part.greedy for part in parts if part.greedy is not None]
        return batch.with_columns(greedy=self._share(greedy)) if greedy else batch


def pack(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a batch, and the rest for JSON."""
    tensors = {name: x.cpu().contiguous() for name, x in vars(batch).items() if torch.is_tensor(x)}
    rest = {name: getattr(batch, name) for name in LISTS}
    rest["episodes"] = [{"turns": x.turns, "error": x.error} for x in batch.episodes]
    if batch.greedy is not None:
        more, rest["greedy"] = pack(batch.greedy)
        tensors |= {GREEDY + name: value for name, value in more.items()}
    return tensors, rest


def unpack(tensors: Mapping[str, Tensor], rest: dict[str, Any], prompts: Prompts) -> Batch:
    """Reverse `pack`."""
    own: dict[str, Any] = {name: x for name, x in tensors.items() if not name.startswith(GREEDY)}
    if (greedy := rest.pop("greedy", None)) is not None:
        more = {name.removeprefix(GREEDY): x for name, x in tensors.items() if name not in own}
        own["greedy"] = unpack(more, greedy, prompts)
    columns = prompts.rows[rest["dataset_rows"]]
    columns.pop("prompt", None)
    rest["episodes"] = [SimpleNamespace(**x) for x in rest["episodes"]]
    return Batch(**own, **rest, columns=columns)


def read(path: Path, prompts: Prompts, device: torch.device) -> list[tuple[dict[str, int], Any]]:
    """Return the step and version of each batch in a file, with the result of its job."""
    found = []
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for i, facts in enumerate(json.loads(file.metadata()["jobs"])):
            own = [name for name in names if name.startswith(f"{i}.")]
            tensors = {name.removeprefix(f"{i}."): file.get_tensor(name).to(device) for name in own}
            batch = unpack(tensors, facts.pop("batch"), prompts)
            result = batch, facts.pop("end"), facts.pop("seconds")
            found.append((facts, result))
    return found


def _file(directory: Path, rank: int) -> Path:
    return directory / f"ahead-rank{rank}.safetensors"
