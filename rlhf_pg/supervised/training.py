"""The loop of supervised runs, on the backends, checkpoints and trackers of the RL trainers.

A step trains on `batch_size` rows over all processes; the last step of an epoch has what is left.
Its loss is a mean over the tokens of its term (one of each pair) in all its rows, however they are
split.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.checkpoint import Checkpointer, TrainState, atomic
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.config import dump
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data import Batch, vocabulary_fingerprint
from rlhf_pg.report.journal import Journal, due
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.learner import Learner, Outputs
from rlhf_pg.run.objective import Objective, Term
from rlhf_pg.run.optimizer import adamw
from rlhf_pg.run.token_budget import most
from rlhf_pg.runtime import Runtime, Terminated, Termination, broadcasts_failure
from rlhf_pg.runtime.trackers import Trackers

TOKENS = 16384  # most in an automatic micro-batch

Metrics = dict[str, float]
E = TypeVar("E")  # an example, of which a row is made


class SupervisedTrainer(ABC, Generic[E]):
    """Trains a module on rows by the terms of an objective.

    Args:
        module: given a batch, returns what the terms need; it has `window`, the tokens of the
            longest row that it packs.
        model: what is saved: the module's model, or its adapter.
        examples: of the training data.
        held_out: examples to evaluate on, by name; a single set has the name "".
    """

    def __init__(
        self,
        module: nn.Module,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[E],
        held_out: Mapping[str, Sequence[E]],
        args: SupervisedConfig,
        runtime: Runtime,
        token_budget: int,
    ) -> None:
        data = fingerprint(examples)
        if args.dataset_fingerprint not in (None, data):
            raise ValueError(
                f"the training data have the fingerprint {data}, not dataset_fingerprint "
                f"{args.dataset_fingerprint}: the data or the tokenizer differ; leave it out"
            )
        args = replace(args.on(runtime.device.type), dataset_fingerprint=data)
        self.args = args
        self.examples = examples
        self.held_out = held_out
        self.runtime = runtime
        self.state = TrainState()
        self.steps_per_epoch = math.ceil(len(examples) / args.batch_size)
        steps = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.total = args.max_steps if args.max_steps > 0 else steps
        self.objective = Objective(
            self.terms(),
            aggregation="token_mean",
            max_completion_length=1,
            all_sum=runtime.all_reduce_sum,
        )
        optimizer = adamw([(module, args.learning_rate)], args)
        warmup = args.warmup_steps
        if warmup < 1:  # a share of all steps
            warmup *= self.total
        scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            math.ceil(warmup),
            self.total,
        )
        module.to(runtime.loading_device)
        self.learner = Learner(
            module=module,
            parts={"model": model},
            packers=[module],
            optimizer=optimizer,
            scheduler=scheduler,
            runtime=runtime,
            max_grad_norm=args.max_grad_norm,
            token_budget=token_budget,
            state=self.state,
        )
        described = {"train_dataset": data, "tokenizer": vocabulary_fingerprint(tokenizer)}
        self.checkpointer = Checkpointer(
            directory=Path(args.output_dir) / "checkpoints",
            parts=self.learner.parts,
            tokenizer=tokenizer,
            backend=self.learner.backend,
            scheduler=scheduler,
            state=self.state,
            config=asdict(args),
            fingerprints=lambda: self.learner.fingerprints | described,
            limit=args.save_total_limit,
        )

    @abstractmethod
    def terms(self) -> list[Term]:
        """Return the terms of the objective."""

    @abstractmethod
    def batch_of(self, examples: Sequence[E]) -> Batch:
        """Return the rows of examples."""

    @abstractmethod
    def measure(self, batch: Batch) -> Outputs:
        """Return numbers (B,) of the held-out rows of a micro-batch, by name."""

    @abstractmethod
    def summarize(self, numbers: Tensor) -> Metrics:
        """Return metrics, from the float64 numbers of all held-out rows, (N,K)."""

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
                    saves = due(state.step, args.save_steps, self.total)
                    if saves:  # before an evaluation, which may fail
                        saver.save(runtime)
                    evaluates = state.step == self.total or due(state.step, args.eval_steps)
                    try:
                        measured = self.evaluate() if evaluates else {}
                        metrics |= measured
                    finally:
                        journal.step(metrics)
                    if evaluates or due(state.step, args.logging_steps):
                        trackers.log(metrics)
                    number = termination.agree()
                    if number and not saves:
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
        """Make one update, and count it; the loss is a mean over the tokens of all its rows."""
        args = self.args
        state = self.state
        runtime = self.runtime
        meter = Meter()
        rate = self.learner.optimizer.param_groups[0]["lr"]
        places = order(len(self.examples), args.batch_size, args.seed, state.step)
        examples = [self.examples[i] for i in places[runtime.rank :: runtime.world]]
        self.learner.module.train()
        self.learner.accumulate(self.batch_of(examples), self.objective, meter)
        norm = self.learner.backend.step()
        self.learner.scheduler.step()
        state.step += 1
        state.skipped_in_a_row += 1
        if math.isfinite(norm):
            state.skipped_in_a_row = 0
        if state.skipped_in_a_row > args.max_skipped_steps:
            raise FloatingPointError(
                f"step {state.step}: {state.skipped_in_a_row} gradients in a row are not finite: "
                "lower learning_rate"
            )
        return {
            "step": state.step,
            **meter.means(runtime.all_reduce_sum(meter.sums())),
            "grad_norm": norm,
            "learning_rate": rate,
            "epoch": state.step / self.steps_per_epoch,
            "step_time": meter.age,
        }

    def evaluate(self) -> Metrics:
        """Return the metrics on every held-out set."""
        runtime = self.runtime
        self.learner.module.eval()
        metrics = Metrics()
        for name, examples in self.held_out.items():
            parts = []
            for start in range(0, len(examples), self.args.batch_size):
                some = examples[start : start + self.args.batch_size]
                batch = self.batch_of(some[runtime.rank :: runtime.world])
                columns = self.learner.map_micro_batches(batch, self.measure)
                parts.append(torch.stack([*columns.values()], dim=1))
            numbers, _ = runtime.gather(torch.cat(parts).double())
            prefix = f"eval_{name}_" if name else "eval_"
            for key, value in self.summarize(numbers.cpu()).items():
                metrics[prefix + key] = value
        return metrics


def token_budget(args: SupervisedConfig, longest: int, runtime: Runtime) -> int:
    """Return `micro_batch_tokens`, for rows of at most `longest` tokens; for "auto" as many as are
    still faster, up to `TOKENS`.
    """
    if args.micro_batch_tokens != "auto":
        return int(args.micro_batch_tokens)
    return max(longest, min(TOKENS, most(runtime.device.type, longest)))


def order(size: int, batch: int, seed: int, step: int) -> list[int]:
    """Return the rows of a step: a batch (the last may be smaller) of a permutation per epoch."""
    epoch, place = divmod(step, math.ceil(size / batch))
    return _permutation(size, seed + epoch)[place * batch : (place + 1) * batch]


@lru_cache(1)
def _permutation(size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randperm(size, generator=generator).tolist())


def fingerprint(rows: Any) -> str:
    """Return the SHA-256 of rows, as dicts or tuples, whose values are token ids or numbers."""
    digest = hashlib.sha256()
    for row in rows:
        for value in row.values() if isinstance(row, dict) else row:
            digest.update(np.asarray(value, dtype=np.float64).tobytes() + b"|")
    return digest.hexdigest()
