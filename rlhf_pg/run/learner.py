"""The gradient of an objective, micro-batch by micro-batch, for any run.

Shapes: B rows on this rank, T completion width.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_pg.checkpoint.checkpointer import TrainState
from rlhf_pg.data.batch import Batch, to_device
from rlhf_pg.failpoints import failpoint
from rlhf_pg.models.policy import fingerprint
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.objective import Objective
from rlhf_pg.runtime import FullWeights, Runtime

Columns = dict[str, Tensor]  # columns of a batch, by name
Outputs = dict[str, Tensor | None]  # columns of a micro-batch; None: not computed


class Learner:
    """Runs a module over batches, and adds up the gradient of an objective. It knows no algorithm
    and no loss.

    Args:
        module: called with a batch; not yet sharded.
        parts: the models that are saved, described or compared, by name.
        packers: those whose `window` says which rows can be packed.
        optimizer, scheduler: for all trained parameters; None where nothing is trained, as in an
            evaluation. The module is then placed like a reference model.
        token_budget: tokens in one forward pass.
        max_skipped_steps: most consecutive steps without an update.
        state: the counters of the run, including skipped steps.

    Attributes:
        size: of the module, in words.
        updates_begun: the step's updates that have reached the weights, or are about to.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        parts: Mapping[str, nn.Module],
        packers: Sequence[Any],
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        runtime: Runtime,
        max_grad_norm: float,
        max_skipped_steps: int,
        token_budget: int,
        state: TrainState,
    ) -> None:
        self.module = module
        self.packers = packers
        self.scheduler = cast(LRScheduler, scheduler)
        self.runtime = runtime
        self.max_skipped_steps = max_skipped_steps
        self.token_budget = token_budget
        self.state = state
        self.updates_begun = 0
        self.size = _size(module)
        module.eval()  # except during updates
        self.parts = {
            name: FullWeights(part, runtime.splits, runtime.watch) for name, part in parts.items()
        }
        if runtime.splits:
            _ = self.fingerprints  # cached while the weights are whole
        if optimizer is None:
            runtime.place(module)
            self.backend = cast(Any, partial(runtime.output, module))
        else:
            self.backend = runtime.prepare(module, optimizer, max_grad_norm)

    @property
    def optimizer(self) -> Optimizer:
        """The `torch` optimizer, which holds the learning rates."""
        return cast(Optimizer, self.backend.optimizer)

    @cached_property
    def fingerprints(self) -> dict[str, str | None]:
        """Fingerprints of the models: names, shapes and frozen values; a reference or critic that
        is not there has None.
        """
        known = {name: fingerprint(part.pieces) for name, part in self.parts.items()}
        return {"reference": None, "critic": None, **known}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Put the module into train mode in the block, which makes a step's updates; if it fails,
        gradients are cleared.
        """
        self.updates_begun = 0
        self.module.train()
        try:
            yield
        except BaseException:
            self.backend.discard_update()
            raise
        finally:
            self.module.eval()

    def accumulate(
        self,
        minibatch: Batch,
        objective: Objective,
        meter: Meter,
        update: int = 0,
    ) -> Columns:
        """Add up the gradient of one optimizer update, micro-batch by micro-batch; return what
        `observe` kept of its outputs. `update` is its number in the step.
        """
        size = minibatch.completion_ids.shape
        minibatch = objective.with_rows(minibatch, self.state.step, update)
        # Counted over the whole update and all ranks, so how rows are split changes no gradient.
        counts = objective.counts(minibatch)
        minibatch = objective.predict(minibatch)
        columns = Columns()
        micro_batches = list(self.micro_batches(minibatch))
        # The shares of all micro-batches and processes add up to 1: a logged mean is their sum.
        share = 1 / (self.runtime.world * len(micro_batches))
        for i, (rows, batch) in enumerate(micro_batches):
            with self.backend.micro_batch(last=i + 1 == len(micro_batches)):
                outputs = self.backend(batch)
                batch, kept = self.observe(batch, outputs, meter)
                collect(columns, minibatch, rows, kept)
                loss = objective(outputs, batch, counts, meter)
                failpoint("backward")
                self.backend.backward(_spoil(loss))
            meter.add("loss", loss, share)
        # Rows that terms have added come last, and may be longer.
        return {name: column[: size[0], : size[1]] for name, column in columns.items()}

    def observe(self, batch: Batch, outputs: Any, meter: Meter) -> tuple[Batch, Outputs]:
        """Return a micro-batch with what the terms need of its outputs, and columns to keep."""
        return batch, {}

    def update_weights(self) -> float:
        """Make an optimizer update of the gradient, or none if its norm is not finite; return the
        norm, which all processes share.
        """
        self.updates_begun += 1
        failpoint("step")
        norm = float(self.backend.step())
        if not math.isfinite(norm):
            self.updates_begun -= 1
        return norm

    def count_step(self, updated: bool) -> None:
        """Count a step without an update; FloatingPointError if there are too many in a row. Steps
        are counted, not updates: one bad batch may spoil every pass over it.
        """
        state = self.state
        before = state.skipped_in_a_row
        state.skipped_in_a_row = 0 if updated else before + 1
        if state.skipped_in_a_row > self.max_skipped_steps:
            raise FloatingPointError(
                f"step {state.step + 1}: the gradient is not finite, as in the {before} steps "
                "before it (max_skipped_steps). Lower learning_rate or max_grad_norm, or use dtype "
                "float32"
            )

    @torch.no_grad()
    def map_micro_batches(self, batch: Batch, compute: Callable[[Batch], Outputs]) -> Columns:
        """Apply `compute` to every micro-batch and merge the results; None is left out."""
        columns = Columns()
        for rows, part in self.micro_batches(batch):
            collect(columns, batch, rows, compute(part))
        return columns

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor | None, Batch]]:
        """Yield micro-batches within the token budget, equally many on every process.

        A process with fewer yields blank rows (indices None) to avoid deadlocks. If no process has
        a row, one blank row still gives every parameter a gradient.
        """
        window = min(packer.window for packer in self.packers)  # padded rows must fit too
        batch = batch.with_counts()
        chunks = batch.micro_batches(self.token_budget, window)
        # Reduced before the first pass, which may itself wait for the other processes.
        count = max(1, self.runtime.all_reduce_max(len(chunks)))
        for rows in chunks:
            yield rows, batch.select(rows)
        for _ in range(count - len(chunks)):
            yield None, batch.blank_row()


def collect(columns: Columns, batch: Batch, rows: Tensor | None, outputs: Outputs) -> None:
    """Put the outputs of a micro-batch, of these rows of the batch, into columns."""
    for name, column in outputs.items():
        if column is None:
            continue
        if name not in columns:
            shape = batch.completion_ids.shape[: column.ndim]
            columns[name] = column.new_zeros(*shape, *column.shape[2:])
        if rows is not None:
            # The rows of a micro-batch may all be shorter than the longest.
            chosen = to_device(rows, column.device)
            index = chosen if column.ndim == 1 else (chosen, slice(column.shape[1]))
            columns[name][index] = column


def _size(module: nn.Module) -> str:
    """Describe the size of a module, for example "0.43M parameters in float32"."""
    total = 0
    trained = 0
    for parameter in module.parameters():
        total += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    text = f"{total / 1e6:.2f}M parameters in {dtype}"
    return text if trained == total else f"{text}, {trained / 1e6:.2f}M trained"


def _spoil(loss: Tensor) -> Tensor:
    """Return a finite loss unchanged, any other as NaN: the whole gradient becomes NaN, so every
    process sees a norm that is not finite and skips the update.
    """
    return loss * (1 + (loss - loss).detach())
