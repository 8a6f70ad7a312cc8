"""The part of a step that runs the models: log-probabilities of a rollout, and updates on it.

Shapes: B rows on this rank, T completion width.
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_pg.checkpoint.checkpointer import TrainState
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch, to_device
from rlhf_pg.data.prompts import permutation
from rlhf_pg.failpoints import failpoint
from rlhf_pg.kl import kl_estimate
from rlhf_pg.models.critic import Models
from rlhf_pg.models.lm_head import evaluating
from rlhf_pg.models.policy import PolicyOutput, fingerprint
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.objective import Objective
from rlhf_pg.runtime import FullWeights, Runtime, full, gathered
from rlhf_pg.trainers.optimizer import group_of

logger = logging.getLogger(__name__)

Columns = dict[str, Tensor]  # columns of a batch, by name
Outputs = dict[str, Tensor | None]  # columns of a micro-batch; None: not computed
# Is given the batch of a step with `old_logprobs` before any weight changes; returns metrics.
Check = Callable[[Batch], dict[str, float]]


class Learner:
    """The policy, critic, reference and optimizer of a run.

    Args:
        models: the models, not yet sharded.
        optimizer, scheduler: for all trained parameters; None where nothing is trained, as in an
            evaluation. The policy is then placed like a reference model.
        token_budget: tokens in one forward pass.
        state: the counters of the run, including consecutive steps without an update.

    Attributes:
        full_policy: the model that samples and is saved; sharded weights can be gathered.
        updates_begun: the step's updates that have reached the weights, or are about to.
    """

    def __init__(
        self,
        models: Models,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        runtime: Runtime,
        args: PolicyGradientConfig,
        token_budget: int,
        state: TrainState,
    ) -> None:
        self.policy = models.policy
        self.critic = models.critic
        self.reference = models.reference
        self.module = models.module
        self.teacher = models.teacher
        self.scheduler = cast(LRScheduler, scheduler)
        self.runtime = runtime
        self.args = args
        self.token_budget = token_budget
        self.state = state
        self.passes = args.num_iterations + args.critic_only_iterations
        self.updates_begun = 0
        self.size = self._size()
        # Fingerprints need whole weights, so they are taken before the models are sharded.
        parts = {
            "model": self.policy.model,
            "critic": self.critic,
            "reference": self.reference,
        }
        self.parts = {
            name: FullWeights(part, runtime.splits, runtime.watch)
            for name, part in (parts | {"teacher": self.teacher}).items()
            if part is not None
        }
        self.full_policy = self.parts["model"]
        if runtime.splits:
            _ = self.fingerprints  # cached
        if optimizer is None:
            runtime.place(self.policy)
            self.backend = cast(Any, partial(runtime.output, self.policy))
            return
        self._rates = {"learning_rate": group_of(self.policy, optimizer)}
        if self.critic is not None:
            self._rates["value_learning_rate"] = group_of(self.critic, optimizer)
        self.backend = runtime.prepare(self.module, optimizer, args.max_grad_norm)
        for frozen in filter(None, (self.reference, self.teacher)):
            runtime.place(frozen)

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

    def _size(self) -> str:
        """Describe the size of the models, for example "0.43M parameters in float32"."""
        total = sum(p.numel() for p in self.module.parameters())
        trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        text = f"{total / 1e6:.2f}M parameters in {self.args.dtype}"
        if self.critic is not None:
            text += " with the critic"
        return text if trained == total else f"{text}, {trained / 1e6:.2f}M trained"

    def log_probs(self, batch: Batch) -> Tensor:
        """Return the policy's log-probabilities of a micro-batch, (B,T); may be collective."""
        with evaluating(self.module):
            logprobs: Tensor = self.backend(batch).logprobs
        return logprobs

    def infer(self, batch: Batch, teacher_batch: Batch | None = None) -> Batch:
        """Add what the algorithm needs from the models before the update.

        The policy's log-probabilities are left out where nothing needs them
        (`needs_old_logprobs`), the reference's without a KL. `teacher_batch` is the batch with
        the prompts that the teacher sees; rows without action tokens there are not taught.
        """
        columns = Columns()
        needs_old = self.args.needs_old_logprobs

        def ask_policy(part: Batch) -> Outputs:
            if not needs_old:
                values, end_values = self.backend(part, values_alone=True)
                return {"values": values, "end_values": end_values}
            output: PolicyOutput = self.backend(part)
            return {
                "old_logprobs": output.logprobs,
                "values": output.values,
                "entropies": output.entropy if self.args.top_entropy_quantile < 1 else None,
                "end_values": output.end_values,
            }

        if needs_old or self.critic is not None:
            columns = self._map_micro_batches(batch, ask_policy)
        if self.reference is not None:
            ask = partial(self.runtime.output, self.reference)
            columns |= self._map_micro_batches(batch, lambda part: {"ref_logprobs": ask(part)})
        if (teacher := self.teacher) is not None:

            def ask_teacher(part: Batch) -> Outputs:
                logprobs, hidden = self.runtime.output(teacher, part)
                return {
                    "teacher_logprobs": logprobs,
                    "teacher_hidden": hidden,
                }

            seen = batch if teacher_batch is None else teacher_batch
            columns |= self._map_micro_batches(seen, ask_teacher)
            untaught = batch.action_mask & ~seen.action_mask
            logprobs = columns["teacher_logprobs"]
            columns["teacher_logprobs"] = logprobs.masked_fill(untaught, math.nan)
            # The head that the divergence of the update needs, whole.
            self.policy.teacher = teacher.head(lambda w: full(w).to(self.runtime.device))
        return batch.with_columns(**columns)

    def update(
        self,
        batch: Batch,
        objective: Objective,
        meter: Meter,
        check: Check | None = None,
    ) -> dict[str, float]:
        """Make every optimizer update on the batch of a step; if one fails, gradients are cleared.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row made no update. Steps
                are counted, not updates: one bad batch may spoil every pass over it.
        """
        self.updates_begun = 0
        # The only update computes the old log-probabilities, with its dropout.
        is_comparable = batch.old_logprobs is not None or not self.policy.drops
        self.module.train()
        try:
            metrics, batch = self._updates(batch, objective, meter, check)
        except BaseException:
            self.backend.discard_update()
            raise
        finally:
            self.module.eval()
        step = self.state.step
        before = self.state.skipped_in_a_row
        self.state.skipped_in_a_row = 0 if metrics["num_updates"] else before + 1
        if self.state.skipped_in_a_row > self.args.max_skipped_steps:
            raise FloatingPointError(
                f"step {step + 1}: the gradient is not finite, as in the {before} steps before it "
                "(max_skipped_steps). Lower learning_rate or max_grad_norm, or use dtype float32"
            )
        moves = metrics["num_updates"] and not self.trains_critic_alone(step)
        metrics["approx_kl/after"] = math.nan
        if moves and is_comparable:
            metrics["approx_kl/after"] = self._kl_after_updates(batch)
        return metrics

    def _updates(
        self,
        batch: Batch,
        objective: Objective,
        meter: Meter,
        check: Check | None,
    ) -> tuple[dict[str, float], Batch]:
        """Make the updates; return metrics, and the batch with `old_logprobs`."""
        args = self.args
        step = self.state.step
        checked: dict[str, float] = {}
        norms: list[float] = []
        skipped = 0
        drifted = False
        rates = {name: group["lr"] for name, group in self._rates.items()}
        for number, (iteration, minibatch) in enumerate(self._minibatches(batch, step)):
            is_extra = iteration >= args.num_iterations  # trains the critic alone
            if drifted and not is_extra:
                continue
            seen = Meter()
            logprobs = self.accumulate(minibatch, objective, seen, number)
            if number == 0:
                first = batch
                if (
                    batch.old_logprobs is None
                ):  # the only update (`compares_with_old`) computed them
                    first = minibatch.with_columns(old_logprobs=logprobs)
                if check is not None:
                    checked = check(first)
            if not is_extra:
                meter.absorb(seen)
            if is_extra or self.trains_critic_alone(step):
                # After the all-reduce, since DDP waits for every gradient, and before clipping: the
                # frozen policy's gradient enters neither the norm nor Adam's moments.
                self.backend.zero_grad_of(self.policy)
            elif norms and self._has_drifted(seen):  # the first update has the old policy
                drifted = True
                self.backend.zero_grad_of(self.module)
                self.backend.step()  # changes nothing, and ends the update in DeepSpeed
                continue
            self.updates_begun += 1
            failpoint("step")
            norm = self.backend.step()
            if math.isfinite(norm):
                if not is_extra:
                    norms.append(norm)
                continue
            self.updates_begun -= 1  # all processes skip together, since they share the norm
            skipped += not is_extra
            if self.runtime.is_main:
                logger.warning(
                    "step %d, update %d: the gradient is not finite (norm %s), so the update is "
                    "skipped; rlhf-pg replay shows the step's completions",
                    step + 1,
                    number,
                    norm,
                )
        metrics = {
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            **rates,
            "num_updates": len(norms),
            "skipped_updates": skipped,
            **checked,
        }
        return metrics, first

    def trains_critic_alone(self, step: int) -> bool:
        """Tell whether the policy is frozen in this step, counted from 0."""
        return step < self.args.policy_frozen_until

    def sync_reference(self, step: int) -> None:
        """Move the reference towards the policy if it is due, and a teacher that is the policy."""
        args = self.args
        if args.sync_ref_model and step % args.ref_model_sync_steps == 0:
            assert self.reference is not None  # the config requires beta > 0
            self.reference.follow(self.policy, args.ref_model_mixup_alpha, gathered)
        if self.teacher is not None and self.teacher.moves:
            self.teacher.follow(self.policy, args.teacher_mixup_alpha, gathered)

    def next_rate(self, scale: float) -> None:
        """Advance the learning-rate schedule by a step, and scale its rates."""
        self.scheduler.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= scale

    def _minibatches(self, batch: Batch, step: int) -> Iterator[tuple[int, Batch]]:
        """Yield the minibatches of all passes; prompt i is always in minibatch i mod
        `num_mini_batches`."""
        args = self.args
        for iteration in range(self.passes):
            for m in permutation(args.num_mini_batches, args.seed, step, iteration):
                rows = (batch.groups % args.num_mini_batches == m).nonzero().squeeze(1)
                yield iteration, batch.select(rows)

    def _kl_after_updates(self, batch: Batch) -> float:
        """Measure KL(old || new) per trained token, over rows of the step on all processes.

            E_old[sum_t (rho_t - 1 - log rho_t)] / E_old[length],   rho_t = pi(y_t) / pi_old(y_t)

        This takes one more forward pass, of about every 16th row (of whole groups with 16 prompts
        or more), or of all rows where something follows the number. The updates trained on these
        rows, whose ratios moved most: in small runs it is 1.1 to 3.2 times the KL on completions
        that are drawn anew.
        """
        if not self.args.follows_old_kl:
            prompts = min(16, self.args.prompts_per_step)
            samples = self.args.num_generations
            groups = batch.groups.tolist()
            apart = 16 // prompts
            rows = []
            for row, group in enumerate(groups):
                sample = row % samples
                if group % prompts == 0 and sample % apart == 0:
                    rows.append(row)
            batch = batch.with_counts().select(torch.tensor(rows, dtype=torch.int64))
        batch = batch.with_columns(teacher_hidden=None)
        now = self._map_micro_batches(
            batch,
            lambda part: {"logprobs": self.backend(part).logprobs},
        )
        kl = kl_estimate(batch.old_logprobs, now["logprobs"], "k3")
        return float(self.runtime.mean_and_var(kl, batch.action_mask)[0])

    def _has_drifted(self, seen: Meter) -> bool:
        """Return whether an update's KL(old || new) ends the updates of its step; collective."""
        if self.args.target_kl is None:
            return False
        means = seen.means(self.runtime.all_reduce_sum(seen.sums()))
        # The factor of Spinning Up and Stable-Baselines3.
        return means["approx_kl"] > 1.5 * self.args.target_kl

    def accumulate(
        self,
        minibatch: Batch,
        objective: Objective,
        meter: Meter,
        update: int = 0,
    ) -> Tensor:
        """Add the gradient of one optimizer update to `.grad`, micro-batch by micro-batch; return
        the policy's log-probabilities (B,T) before it. `update` is its number in the step.
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
                new: PolicyOutput = self.backend(batch)
                logprobs = torch.where(batch.action_mask, new.logprobs.detach(), 0.0)
                _collect(columns, minibatch, rows, {"logprobs": logprobs})
                if batch.old_logprobs is None:
                    batch = batch.with_columns(old_logprobs=logprobs)
                loss = objective(new, batch, counts, meter)
                failpoint("backward")
                self.backend.backward(_spoil(loss))
            meter.add("loss", loss, share)
            meter.add_masked("entropy", new.entropy, batch.action_mask)
        # Rows that terms have added come last, and may be longer.
        return columns["logprobs"][: size[0], : size[1]]

    @torch.no_grad()
    def _map_micro_batches(self, batch: Batch, compute: Callable[[Batch], Outputs]) -> Columns:
        """Apply `compute` to every micro-batch and merge the results; None is left out."""
        columns = Columns()
        for rows, part in self.micro_batches(batch):
            _collect(columns, batch, rows, compute(part))
        return columns

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor | None, Batch]]:
        """Yield micro-batches within the token budget, equally many on every process.

        A process with fewer yields blank rows (indices None) to avoid deadlocks. If no process has
        a row, one blank row still gives every parameter a gradient.
        """
        window = self.policy.window
        if self.critic is not None:  # a row that either model pads must fit
            window = min(window, self.critic.window)
        if self.teacher is not None:
            window = min(window, self.teacher.policy.window)
        batch = batch.with_counts()
        chunks = batch.micro_batches(self.token_budget, window)
        # Reduced before the first pass, which may itself wait for the other processes.
        count = max(1, self.runtime.all_reduce_max(len(chunks)))
        for rows in chunks:
            yield rows, batch.select(rows)
        for _ in range(count - len(chunks)):
            yield None, batch.blank_row()


def _collect(columns: Columns, batch: Batch, rows: Tensor | None, outputs: Outputs) -> None:
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
            place = chosen if column.ndim == 1 else (chosen, slice(column.shape[1]))
            columns[name][place] = column


def _spoil(loss: Tensor) -> Tensor:
    """Return a finite loss as it is; another makes the whole gradient NaN, so that every process
    sees a norm that is not finite and skips the update.
    """
    return loss * (1 + (loss - loss).detach())
