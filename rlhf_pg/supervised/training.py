"""The loop of supervised runs, on the backends, checkpoints and trackers of the RL trainers.

A step trains on `batch_size` rows over all processes; the last step of an epoch has what is left.
Its loss is a mean over the units (tokens, pairs) of all its rows, however they are split.
"""

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.checkpoint import Checkpointer, TrainState, atomic
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.config import dump
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data import vocabulary_fingerprint
from rlhf_pg.models import policy
from rlhf_pg.models.policy import checkpoint_activations, train_as_evaluated
from rlhf_pg.report.journal import Journal, due
from rlhf_pg.runtime import FullWeights, Runtime, Terminated, Termination, broadcasts_failure
from rlhf_pg.runtime.trackers import Trackers

# Limits of an automatic micro-batch: padded tokens, and their logits. The logits are 1 GiB in
# float32, and the loss needs three to four times as much at its peak.
TOKENS = 16384
LOGITS = 2**28
MOST_SKIPPED = 3  # consecutive steps without a finite gradient

Inputs = dict[str, Tensor]
Metrics = dict[str, float]


class LossModule(nn.Module, ABC):
    """A model and its loss on rows of data."""

    vocabulary = 1  # logits of a token

    def __init__(self, model: PreTrainedModel, args: SupervisedConfig) -> None:
        super().__init__()
        self.model = model
        self._dtype = getattr(torch, args.dtype)

    def autocast(self, inputs: Inputs) -> AbstractContextManager[Any]:
        """Compute in bfloat16 inside the block, if the config says so."""
        kind = next(iter(inputs.values())).device.type  # weights may be offloaded
        return torch.autocast(kind, torch.bfloat16, self._dtype == torch.bfloat16)

    def count(self, row: Any) -> int:
        """Return the units of a row over which the loss is a mean."""
        return 1

    @abstractmethod
    def size(self, row: Any) -> int:
        """Return the tokens of a row."""

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Inputs:
        """Make the inputs of `forward`."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Return (B,K) numbers of the rows."""

    @abstractmethod
    def loss(self, numbers: Tensor) -> Tensor:
        """Return the sum over all units, from the numbers of a micro-batch."""

    @abstractmethod
    def summarize(self, numbers: Tensor) -> Metrics:
        """Return metrics, from the float64 numbers of all held-out rows."""


def weight_dtype(args: SupervisedConfig) -> torch.dtype:
    """Return the dtype of trained weights: bfloat16 would lose small updates."""
    if args.dtype == "float64":
        return torch.float64
    return torch.float32


class SupervisedTrainer:
    """Trains an objective on rows of data.

    It saves `model`, the objective's or its adapter. Rows to evaluate on are `held_out`, by name; a
    single set has the name "".
    """

    def __init__(
        self,
        objective: LossModule,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Any],
        held_out: Mapping[str, Sequence[Any]],
        args: SupervisedConfig,
        runtime: Runtime,
    ) -> None:
        data = fingerprint(rows)
        if args.dataset_fingerprint not in (None, data):
            raise ValueError(
                f"the training data have the fingerprint {data}, not dataset_fingerprint "
                f"{args.dataset_fingerprint}: the data or the tokenizer differ; leave it out"
            )
        args = replace(args.on(runtime.device.type), dataset_fingerprint=data)
        if args.gradient_checkpointing:
            checkpoint_activations(model, args.gradient_checkpointing == "offload")
        self.args = args
        self.objective = objective
        self.rows = rows
        self.held_out = held_out
        self.runtime = runtime
        self.state = TrainState()
        self.steps_per_epoch = math.ceil(len(rows) / args.batch_size)
        steps = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.total = args.max_steps if args.max_steps > 0 else steps
        longest = max(map(objective.size, chain(rows, *held_out.values())))
        self.rows_per_pass = micro_batch_size(args, objective.vocabulary, longest, runtime.world)
        fingerprints = {
            "reference": None,
            "critic": None,
            "model": policy.fingerprint(model),
            "train_dataset": data,
            "tokenizer": vocabulary_fingerprint(tokenizer),
        }
        parts = {"model": FullWeights(model, runtime.splits, runtime.watch)}
        objective.to(runtime.loading_device)
        trained = [p for p in objective.parameters() if p.requires_grad]
        groups = []
        if wide := [p for p in trained if p.ndim >= 2]:
            groups.append({"params": wide, "weight_decay": args.weight_decay})
        if narrow := [p for p in trained if p.ndim < 2]:  # biases and norms do not decay
            groups.append({"params": narrow, "weight_decay": 0.0})
        optimizer = AdamW(groups, lr=args.learning_rate, fused=True)
        warmup = args.warmup_steps
        if warmup < 1:  # a share of all steps
            warmup *= self.total
        scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            math.ceil(warmup),
            self.total,
        )
        self.backend = runtime.prepare(objective, optimizer, args.max_grad_norm)
        self.checkpointer = Checkpointer(
            directory=Path(args.output_dir) / "checkpoints",
            parts=parts,
            tokenizer=tokenizer,
            backend=self.backend,
            scheduler=scheduler,
            state=self.state,
            config=asdict(args),
            fingerprints=lambda: fingerprints,
            limit=args.save_total_limit,
        )

    @broadcasts_failure
    def train(self, save: Callable[[atomic.Save, Path], None]) -> Metrics:
        """Train, evaluate, and save by `save` (on all processes); return the metrics on held-out
        rows, which are in `metrics.json` too.

        Raises:
            ValueError: `output_dir` cannot be used, or the checkpoint to resume does not fit.
            FloatingPointError: several gradients in a row were not finite.
            SystemExit: after a signal; the step was finished, and a checkpoint saved.
        """
        args = self.args
        runtime = self.runtime
        state = self.state
        directory = Path(args.output_dir)
        saver = self.checkpointer
        final = directory / "final"
        measured = Metrics()
        trackers = Trackers(args.report_to, runtime)
        termination = Termination(runtime)
        with run_dir_lock(directory, runtime):
            saver.resume(args.resume_from_checkpoint, runtime)
            if state.step > self.total:
                raise ValueError(
                    f"the checkpoint is from step {state.step}, but max_steps or num_train_epochs "
                    f"end the run at {self.total}: raise them"
                )
            journal = Journal(directory, state.step, runtime.is_main, ("loss", "grad_norm"))
            if runtime.is_main:
                recorded = replace(args, resume_from_checkpoint=saver.origin)
                dump(recorded, directory / "config.yaml")
            tracked = trackers.open(directory, args.run_name, asdict(args), state.step > 0)
            with termination.handle_signals(), tracked, journal.progress(self.total):
                while state.step < self.total:
                    metrics = self.step()
                    evaluates = state.step == self.total or due(state.step, args.eval_steps)
                    measured = self.evaluate() if evaluates else {}
                    metrics |= measured
                    journal.step(metrics)
                    if evaluates or due(state.step, args.logging_steps):
                        trackers.log(metrics)
                    number = termination.agree()
                    if number or due(state.step, args.save_steps, self.total):
                        saver.save(runtime)
                    if number:
                        journal.say(f"--resume_from_checkpoint latest resumes {saver.path()}")
                        raise Terminated(number)
                measured = measured or self.evaluate()
                saving = atomic.Save(runtime, final)
                saving.main(lambda: atomic.begin(final))
                save(saving, atomic.partial_of(final))
                saving.main(lambda: atomic.publish(final, {"step": state.step}))
                if runtime.is_main:
                    text = json.dumps(measured, indent=1, sort_keys=True)
                    write_file(directory / "metrics.json", [f"{text}\n".encode()])
            if number := termination.agree():  # also of a signal during the last report
                raise Terminated(number)
            line = f"saved {final}"
            if measured:
                parts = [f"{n.removeprefix('eval_')} {x:.3f}" for n, x in measured.items()]
                line = f"held-out {', '.join(parts)}; {line}"
            journal.say(line)
        return measured

    def step(self) -> dict[str, Any]:
        """Make one update, and count it; the loss is a mean over the units of all its rows."""
        args = self.args
        state = self.state
        begun = time.perf_counter()
        rate = self.backend.optimizer.param_groups[0]["lr"]
        places = order(len(self.rows), args.batch_size, args.seed, state.step)
        rows = [self.rows[i] for i in places]
        units = sum(map(self.objective.count, rows))
        self.objective.train()
        if args.disable_dropout:
            train_as_evaluated(self.objective.model)
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for inputs, size, is_last in self._micro_batches(rows):
            with self.backend.micro_batch(is_last):
                loss = self.objective.loss(self.backend(inputs)) * (min(size, 1) / units)
                self.backend.backward(loss)
            total += loss.detach()
        norm = self.backend.step()
        self.checkpointer.scheduler.step()
        state.step += 1
        state.skipped_in_a_row += 1
        if math.isfinite(norm):
            state.skipped_in_a_row = 0
        if state.skipped_in_a_row > MOST_SKIPPED:
            raise FloatingPointError(
                f"step {state.step}: {MOST_SKIPPED + 1} gradients in a row are not finite: lower "
                "learning_rate"
            )
        return {
            "step": state.step,
            "loss": float(self.runtime.all_reduce_sum(total)),
            "grad_norm": norm,
            "learning_rate": rate,
            "epoch": state.step / self.steps_per_epoch,
            "step_time": time.perf_counter() - begun,
        }

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return the metrics on every held-out set."""
        self.objective.eval()
        metrics = Metrics()
        for name, rows in self.held_out.items():
            parts = [self.backend(inputs)[:n] for inputs, n, _ in self._micro_batches(rows)]
            numbers, _ = self.runtime.gather(torch.cat(parts).double())
            summary = self.objective.summarize(numbers.cpu())
            prefix = f"eval_{name}_" if name else "eval_"
            for key, value in summary.items():
                metrics[prefix + key] = value
        return metrics

    def _micro_batches(self, rows: Sequence[Any]) -> Iterator[tuple[Inputs, int, bool]]:
        """Yield the inputs of this process's micro-batches, as many as on every other process, with
        their number of rows (0 for blank inputs), and whether they are the last.
        """
        runtime = self.runtime
        size = self.rows_per_pass
        local = rows[runtime.rank :: runtime.world]
        most = math.ceil(len(rows) / runtime.world)  # rows of a process
        number = math.ceil(most / size)
        for i in range(number):
            part = local[i * size : (i + 1) * size]
            inputs = self.objective.collate(part or rows[:1])
            inputs = {name: value.to(runtime.device) for name, value in inputs.items()}
            yield inputs, len(part), i + 1 == number


def order(size: int, batch: int, seed: int, step: int) -> list[int]:
    """Return the rows of a step: a batch (the last may be smaller) of a permutation per epoch."""
    epoch, place = divmod(step, math.ceil(size / batch))
    return _permutation(size, seed + epoch)[place * batch : (place + 1) * batch]


@lru_cache(1)
def _permutation(size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randperm(size, generator=generator).tolist())


def micro_batch_size(args: SupervisedConfig, vocabulary: int, longest: int, world: int) -> int:
    """Return the rows of a micro-batch; for "auto" as `TOKENS` and `LOGITS` allow."""
    if isinstance(args.micro_batch_size, int):
        return args.micro_batch_size
    fit = max(1, min(TOKENS, LOGITS // vocabulary) // longest)
    return min(fit, math.ceil(args.batch_size / world))


def fingerprint(rows: Any) -> str:
    """Return the SHA-256 of rows, as dicts or tuples, whose values are token ids or numbers."""
    digest = hashlib.sha256()
    for row in rows:
        for value in row.values() if isinstance(row, dict) else row:
            digest.update(np.asarray(value, dtype=np.float64).tobytes() + b"|")
    return digest.hexdigest()
