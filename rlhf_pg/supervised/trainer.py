"""The step and the evaluation of supervised runs.

A step trains on `batch_size` rows over all processes; the last step of an epoch has the rest. Its
loss is a mean over the tokens of the term (one per pair) in all rows of the step, however they are
split.
"""

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.checkpoint import TrainState
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data import Batch
from rlhf_pg.data.inputs import check_fingerprint
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.learner import Learner, Outputs
from rlhf_pg.run.loop import Callback, TrainingLoop
from rlhf_pg.run.objective import Objective, Term
from rlhf_pg.run.optimizer import adamw
from rlhf_pg.run.token_budget import most
from rlhf_pg.runtime import Runtime, Termination
from rlhf_pg.runtime.trackers import Trackers

TOKENS = 16384  # most in an automatic micro-batch

Metrics = dict[str, float]
E = TypeVar("E")  # an example, of which a row is made


class SupervisedTrainer(TrainingLoop, Generic[E]):
    """Trains a module on rows by the terms of an objective.

    Args:
        module: given a batch, returns what the terms need; it has `window`, the tokens of the
            longest row that it packs.
        model: what is saved: the module's model, or its adapter.
        examples: of the training data.
        held_out: examples to evaluate on, by name; a single set has the name "".

    Attributes:
        measured: the metrics of the held-out sets after the latest step, once evaluated.
    """

    args: SupervisedConfig

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
        callbacks: Sequence[Callback],
    ) -> None:
        self.data_fingerprint = fingerprint(examples)
        check_fingerprint(args.dataset_fingerprint, self.data_fingerprint)
        args = args.on(runtime.device.type)
        self.args = args
        self.examples = examples
        self.held_out = held_out
        self.measured = Metrics()
        self.processing_class = tokenizer
        self.runtime = runtime
        self.trackers = Trackers(args.report_to, runtime)
        self.termination = Termination(runtime)
        self.state = TrainState()
        self.steps_per_epoch = math.ceil(len(examples) / args.batch_size)
        steps = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.total_steps = args.max_steps if args.max_steps > 0 else steps
        self.objective = Objective(
            self.terms(),
            aggregation="token_mean",
            max_completion_length=1,
            all_sum=runtime.all_reduce_sum,
        )
        optimizer = adamw([(module, args.learning_rate)], args)
        warmup = args.warmup_steps
        if warmup < 1:  # a share of all steps
            warmup *= self.total_steps
        module.to(runtime.loading_device)
        self.learner = Learner(
            module=module,
            parts={"model": model},
            packers=[module],
            optimizer=optimizer,
            scheduler=get_scheduler(
                args.lr_scheduler_type,
                optimizer,
                math.ceil(warmup),
                self.total_steps,
            ),
            runtime=runtime,
            max_grad_norm=args.max_grad_norm,
            max_skipped_steps=args.max_skipped_steps,
            token_budget=token_budget,
            state=self.state,
        )
        super().__init__(callbacks)

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

    def describe(self) -> str:
        """Describe the run in one line."""
        return f"{super().describe()}; {len(self.examples)} examples, {self.total_steps} steps"

    def step(self) -> dict[str, Any]:
        """Make one update, and count it; the loss is a mean over the tokens of all its rows."""
        args = self.args
        state = self.state
        runtime = self.runtime
        self.measured = Metrics()
        meter = Meter()
        rate = self.learner.optimizer.param_groups[0]["lr"]
        rows = rows_of_step(len(self.examples), args.batch_size, args.seed, state.step)
        examples = [self.examples[row] for row in rows[runtime.rank :: runtime.world]]
        with self.learner.updating():
            self.learner.accumulate(self.batch_of(examples), self.objective, meter)
            norm = self.learner.update_weights()
        self.learner.count_step(math.isfinite(norm))
        self.learner.scheduler.step()
        state.step += 1
        return {
            "step": state.step,
            **meter.means(runtime.all_reduce_sum(meter.sums())),
            "grad_norm": norm,
            "learning_rate": rate,
            "epoch": state.step / self.steps_per_epoch,
            "step_time": meter.age,
        }

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step, as after the last one."""
        return bool(self.held_out) and (step == self.total_steps or super().evaluates(step))

    def evaluate(self) -> Metrics:
        """Return the metrics on every held-out set."""
        runtime = self.runtime
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
        self.measured = metrics
        return metrics

    def before_final(self, journal: Journal) -> None:
        """Write the metrics on the held-out sets into metrics.json."""
        if not self.measured:  # a run that was stopped, or resumed at its end
            self.evaluate_in_run(journal)
        if self.runtime.is_main:
            text = json.dumps(self.measured, indent=1, sort_keys=True)
            file = Path(self.args.output_dir) / "metrics.json"
            write_file(file, [f"{text}\n".encode()])


def token_budget(args: SupervisedConfig, longest: int, runtime: Runtime) -> int:
    """Return `micro_batch_tokens`, for rows of at most `longest` tokens; for "auto" as many as
    speed up training, at most `TOKENS`.
    """
    if args.micro_batch_tokens != "auto":
        return int(args.micro_batch_tokens)
    return max(longest, min(TOKENS, most(runtime.device.type, longest)))


def rows_of_step(size: int, batch: int, seed: int, step: int) -> Sequence[int]:
    """Return the rows of a step: a batch (the last may be smaller) of a permutation per epoch."""
    epoch, number = divmod(step, math.ceil(size / batch))
    return _permutation(size, seed + epoch)[number * batch : (number + 1) * batch]


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
