"""The part of a step that runs the models: log-probabilities of a rollout, and updates on it.

Shapes: B rows on this rank, T completion width.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
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
from rlhf_pg.losses import Loss, nll, token_weights, weight_count
from rlhf_pg.models import (
    Models,
    PolicyOutput,
    evaluating,
    fingerprint,
)
from rlhf_pg.report.metrics import Meter
from rlhf_pg.runtime import FullWeights, Runtime, full, gathered
from rlhf_pg.trainers.agreement import Agreement
from rlhf_pg.trainers.optimizer import group_of

logger = logging.getLogger(__name__)

Columns = dict[str, Tensor]  # columns of a batch, by name
Outputs = dict[str, Tensor | None]  # columns of a micro-batch; None: not computed


class Learner:
    """The policy, critic, reference and optimizer of a run.

    Args:
        models: the models, not yet sharded.
        optimizer, scheduler: for all trained parameters; None where nothing is trained, as in an
            evaluation. The policy is then placed like a reference model.
        loss: the algorithm's loss per token: (policy output, batch) -> (B,T) and metrics.
        token_budget: tokens in one forward pass.
        state: the counters of the run, including consecutive steps without an update.
        texts: token ids whose likelihood is part of every update (`ptx_coef`).

    Attributes:
        full_policy: the model that samples and is saved; sharded weights can be gathered.
        updates_begun: the step's updates that have reached the weights, or are about to.
    """

    def __init__(
        self,
        models: Models,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        loss: Callable[[PolicyOutput, Batch], Loss],
        runtime: Runtime,
        args: PolicyGradientConfig,
        token_budget: int,
        state: TrainState,
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.texts = texts
        self.first_logprobs: Any = None  # (B,T) of a step's only update
        self.policy = models.policy
        self.critic = models.critic
        self.reference = models.reference
        self.module = models.module
        self.teacher = models.teacher
        self.scheduler = cast(LRScheduler, scheduler)
        self.loss = loss
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

        def score(batch: Batch) -> Tensor:
            with evaluating(self.module):
                logprobs: Tensor = self.backend(batch).logprobs
            return logprobs

        self.agreement = Agreement(
            getattr(torch, args.dtype),
            runtime,
            self.policy,
            score,
            refuses=args.truncated_sampling == "refuse"
            and args.sampler_correction in ("auto", "none")
            and not args.rollout_ahead,
        )

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

    def score(self, batch: Batch, teacher_batch: Batch | None = None) -> Batch:
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

        self.agreement.begin(waits=not needs_old and not self.policy.drops)
        if needs_old or self.critic is not None:
            columns = self._map_micro_batches(batch, ask_policy)
        if needs_old:
            self.agreement.add(batch, columns["old_logprobs"])
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
            self.policy.teacher = teacher.head(lambda w: full(w).to(self.runtime.device))
        return batch.with_columns(**columns)

    def update(self, batch: Batch, step: int, meter: Meter) -> dict[str, float]:
        """Make every optimizer update on the batch of a step; if one fails, gradients are cleared.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row made no update. Steps
                are counted, not updates: one bad batch may spoil every pass over it.
        """
        self.updates_begun = 0
        self.module.train()
        try:
            metrics = self._updates(batch, step, meter)
        except BaseException:
            self.backend.discard_update()
            raise
        finally:
            self.module.eval()
        before = self.state.skipped_in_a_row
        self.state.skipped_in_a_row = 0 if metrics["num_updates"] else before + 1
        if self.state.skipped_in_a_row > self.args.max_skipped_steps:
            raise FloatingPointError(
                f"step {step + 1}: the gradient is not finite, as in the {before} steps before it "
                "(max_skipped_steps). Lower learning_rate or max_grad_norm, or use dtype float32"
            )
        moves = metrics["num_updates"] and not self.trains_critic_alone(step)
        metrics["approx_kl/after"] = self._kl_after_updates(batch) if moves else math.nan
        return metrics

    def _updates(self, batch: Batch, step: int, meter: Meter) -> dict[str, float]:
        args = self.args
        norms: list[float] = []
        skipped = 0
        drifted = False
        rates = {name: group["lr"] for name, group in self._rates.items()}
        for number, (iteration, minibatch) in enumerate(self._minibatches(batch, step)):
            is_extra = iteration >= args.num_iterations  # trains the critic alone
            if drifted and not is_extra:
                continue
            seen = Meter()
            self.accumulate(minibatch, seen)
            if number == 0:  # before any weight changes: do sampler and policy agree?
                agreement = self.agreement.settle(batch.blank_row())
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
        return {
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            **rates,
            "num_updates": len(norms),
            "skipped_updates": skipped,
            **agreement,
        }

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
        if batch.old_logprobs is None:  # the only update has computed them
            batch = batch.with_columns(old_logprobs=self.first_logprobs)
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

    def accumulate(self, minibatch: Batch, meter: Meter) -> None:
        """Add the gradient of one optimizer update to `.grad`, micro-batch by micro-batch."""
        args = self.args
        all_sum = self.runtime.all_reduce_sum
        # Counted over the whole update and all ranks, so how rows are split changes no gradient.
        count = all_sum(weight_count(minibatch.action_mask, args.aggregation))
        micro_batches = list(self.micro_batches(minibatch))
        # The shares of all micro-batches and processes add up to 1: a logged mean is their sum.
        share = 1 / (self.runtime.world * len(micro_batches))
        nll_counts = {name: all_sum(mask.sum()) for name, _, mask in self.nll_terms(minibatch)}
        if self.texts:
            self._accumulate_texts(meter)
        records_old = minibatch.old_logprobs is None and not self.updates_begun
        if records_old:
            self.first_logprobs = torch.zeros_like(minibatch.sampler_logprobs)  # (B,T)
        for i, (rows, batch) in enumerate(micro_batches):
            with self.backend.micro_batch(last=i + 1 == len(micro_batches)):
                scored = batch
                if args.tool_output_nll_coef:  # for this term alone; the loss masks tool output
                    scored = batch.with_columns(action_mask=batch.completion_mask)
                new: PolicyOutput = self.backend(scored)
                if self.agreement.waits:
                    self.agreement.add(batch, new.logprobs)
                if batch.old_logprobs is None:
                    batch = batch.with_columns(old_logprobs=new.logprobs.detach())
                if records_old and rows is not None:
                    place = to_device(rows, self.first_logprobs.device)
                    width = new.logprobs.shape[1]
                    self.first_logprobs[place, :width] = new.logprobs.detach()
                per_token, metrics = self.loss(new, batch)
                weights = token_weights(
                    batch.action_mask,
                    args.aggregation,
                    args.max_completion_length,
                    count,
                    per_token.dtype,
                )
                loss = (per_token * weights).sum()
                for name, coef, mask in self.nll_terms(batch):
                    term = nll(new.logprobs, mask, nll_counts[name])
                    loss = loss + coef * term
                    meter.add(name, term, share)
                failpoint("backward")
                self.backend.backward(_spoil(loss))
            meter.add("loss", loss, share)
            metrics = {"entropy": new.entropy.detach()} | metrics
            for name, numbers in metrics.items():
                meter.add_masked(name, numbers, batch.action_mask)

    def _accumulate_texts(self, meter: Meter) -> None:
        """Add the gradient of -log p(texts) times `ptx_coef`, for rows drawn for this update."""
        args = self.args
        runtime = self.runtime
        key = (args.seed, self.state.step, self.updates_begun)
        drawn = permutation(len(self.texts), *key)[: args.ptx_batch_size]
        texts = [self.texts[i] for i in drawn[runtime.rank :: runtime.world]]
        batch = Batch.from_tokens(
            prompts=[ids[:1] for ids in texts],
            completions=[ids[1:] for ids in texts],
            logprobs=[[0.0] * (len(ids) - 1) for ids in texts],
            truncated=[False] * len(texts),
            groups=range(len(texts)),
            pad_token_id=0,
            device=runtime.device,
        )
        count = runtime.all_reduce_sum(batch.action_mask.sum())
        parts = list(self.micro_batches(batch))
        for _, part in parts:
            with self.backend.micro_batch(last=False):  # the completions follow
                new: PolicyOutput = self.backend(part)
                term = nll(new.logprobs, part.action_mask, count)
                loss = args.ptx_coef * term
                if new.values is not None:  # gives each of the critic's parameters a gradient
                    loss = loss + 0 * new.values.sum()
                self.backend.backward(_spoil(loss))
            meter.add("ptx_nll", term, 1 / (runtime.world * len(parts)))
            meter.add("loss", loss, 0.0)  # the shares of the completions already add up to 1

    def nll_terms(self, batch: Batch) -> Iterator[tuple[str, float, Tensor]]:
        """Yield name, coefficient and tokens (B,T) of each -log p in the loss."""
        args = self.args
        actions = batch.action_mask
        if batch.positive is not None:
            correct = actions & batch.positive[:, None]
            yield "positive_nll", args.positive_nll_coef, correct
        if args.tool_output_nll_coef:  # of rows that are trained on; nothing predicts a root
            answers = batch.completion_mask & ~actions & (batch.all_offsets() > 0)
            answers &= actions.any(1, keepdim=True)
            yield (
                "tool_output_nll",
                args.tool_output_nll_coef,
                answers,
            )

    @torch.no_grad()
    def _map_micro_batches(self, batch: Batch, score: Callable[[Batch], Outputs]) -> Columns:
        """Apply `score` to every micro-batch and merge the results; None is left out."""
        columns = Columns()
        for indices, part in self.micro_batches(batch):
            rows = None if indices is None else to_device(indices, batch.groups.device)
            for name, column in score(part).items():
                if column is None:
                    continue
                if name not in columns:
                    shape = batch.completion_ids.shape[: column.ndim]
                    columns[name] = column.new_zeros(*shape, *column.shape[2:])
                if rows is not None:
                    # The rows of a micro-batch may all be shorter than the longest.
                    place = rows if column.ndim == 1 else (rows, slice(column.shape[1]))
                    columns[name][place] = column
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


def _spoil(loss: Tensor) -> Tensor:
    """Return a finite loss as it is; another makes the whole gradient NaN, so that every process
    sees a norm that is not finite and skips the update.
    """
    return loss * (1 + (loss - loss).detach())
