"""The part of a step that runs the models: log-probabilities of a rollout, and updates on it.

Shapes: B rows on this rank, T completion width.
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_pg.checkpoint.checkpointer import TrainState
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.data.prompts import permutation
from rlhf_pg.kl import kl_estimate
from rlhf_pg.models.critic import Models
from rlhf_pg.models.lm_head import evaluating
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.learner import Columns, Learner, Outputs
from rlhf_pg.run.objective import Objective
from rlhf_pg.run.optimizer import group_of
from rlhf_pg.runtime import Runtime, full, gathered

logger = logging.getLogger(__name__)

# Is given the batch of a step with `old_logprobs` before any weight changes; returns metrics.
Check = Callable[[Batch], dict[str, float]]


class PolicyLearner(Learner):
    """The policy, critic, reference, teacher and optimizer of a run. The trained module is the
    policy or an `ActorCritic`, and returns a `PolicyOutput`.

    Attributes:
        full_policy: the model that samples and is saved; sharded weights can be gathered.
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
        self.teacher = models.teacher
        self.args = args
        self.passes = args.num_iterations + args.critic_only_iterations
        parts: dict[str, nn.Module | None] = {
            "model": self.policy.model,
            "critic": self.critic,
            "reference": self.reference,
            "teacher": self.teacher,
        }
        packers = [self.policy, self.critic, self.teacher and self.teacher.policy]
        if optimizer is not None:
            self._rates = {"learning_rate": group_of(self.policy, optimizer)}
            if self.critic is not None:
                self._rates["value_learning_rate"] = group_of(self.critic, optimizer)
        super().__init__(
            module=models.module,
            parts={name: part for name, part in parts.items() if part is not None},
            packers=[packer for packer in packers if packer is not None],
            optimizer=optimizer,
            scheduler=scheduler,
            runtime=runtime,
            max_grad_norm=args.max_grad_norm,
            max_skipped_steps=args.max_skipped_steps,
            token_budget=token_budget,
            state=state,
        )
        if self.critic is not None:
            self.size += ", with the critic"
        self.full_policy = self.parts["model"]
        for frozen in filter(None, (self.reference, self.teacher)):
            runtime.place(frozen)

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
            columns = self.map_micro_batches(batch, ask_policy)
        if self.reference is not None:
            ask = partial(self.runtime.output, self.reference)
            columns |= self.map_micro_batches(batch, lambda part: {"ref_logprobs": ask(part)})
        if (teacher := self.teacher) is not None:

            def ask_teacher(part: Batch) -> Outputs:
                logprobs, hidden = self.runtime.output(teacher, part)
                return {
                    "teacher_logprobs": logprobs,
                    "teacher_hidden": hidden,
                }

            seen = batch if teacher_batch is None else teacher_batch
            columns |= self.map_micro_batches(seen, ask_teacher)
            untaught = batch.action_mask & ~seen.action_mask
            logprobs = columns["teacher_logprobs"]
            columns["teacher_logprobs"] = logprobs.masked_fill(untaught, math.nan)
            # The head that the divergence of the update needs, whole.
            self.policy.teacher = teacher.head(lambda w: full(w).to(self.runtime.device))
        return batch.with_columns(**columns)

    def observe(self, batch: Batch, outputs: PolicyOutput, meter: Meter) -> tuple[Batch, Outputs]:
        """Keep the policy's log-probabilities: those of a single update are also the old ones."""
        meter.add_masked("entropy", outputs.entropy, batch.action_mask)
        logprobs = torch.where(batch.action_mask, outputs.logprobs.detach(), 0.0)
        if batch.old_logprobs is None:
            batch = batch.with_columns(old_logprobs=logprobs)
        return batch, {"logprobs": logprobs}

    def update(
        self,
        batch: Batch,
        objective: Objective,
        meter: Meter,
        check: Check | None = None,
    ) -> dict[str, float]:
        """Make every optimizer update on the batch of a step; see `count_step`."""
        # The only update computes the old log-probabilities, with its dropout.
        is_comparable = batch.old_logprobs is not None or not self.policy.drops
        with self.updating():
            metrics, batch = self._updates(batch, objective, meter, check)
        updated = metrics["num_updates"] > 0
        self.count_step(updated)
        moves = updated and not self.trains_critic_alone(self.state.step)
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
            outputs = self.accumulate(minibatch, objective, seen, number)
            if number == 0:
                first = batch
                if (
                    batch.old_logprobs is None
                ):  # the only update (`compares_with_old`) computed them
                    first = minibatch.with_columns(old_logprobs=outputs["logprobs"])
                if check is not None:
                    checked = check(first)
            if not is_extra:
                meter.absorb(seen)
            if is_extra or self.trains_critic_alone(step):
                # Before clipping: the frozen policy's gradient enters neither the norm nor Adam's
                # moments.
                self.backend.zero_grad_of(self.policy)
            elif norms and self._has_drifted(seen):  # the first update has the old policy
                drifted = True
                self.backend.zero_grad_of(self.module)
                self.backend.step()  # changes nothing, and ends the update in DeepSpeed
                continue
            norm = self.update_weights()
            if math.isfinite(norm):
                if not is_extra:
                    norms.append(norm)
                continue
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
        """Move the reference, if due, and a self-distillation teacher towards the policy."""
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
        or more), or of all rows if a coefficient or rate follows it. The updates trained on these
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
        now = self.map_micro_batches(
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
