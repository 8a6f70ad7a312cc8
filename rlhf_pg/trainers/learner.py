"""The half of a step that has gradients: scoring a rollout, and the updates made from it.

Shapes: B rows on this rank, T completion width.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import permutation
from rlhf_pg.experience import Experience, Rollout
from rlhf_pg.kl import kl_estimate
from rlhf_pg.losses import Loss, token_weights, weight_count
from rlhf_pg.metrics import Meter
from rlhf_pg.models import Policy, PolicyOutput, Reference, disable_dropout
from rlhf_pg.runtime import Runtime

R = TypeVar("R", bound=Rollout)


class Learner:
    """Policy, reference and optimizer.

    Args:
        loss: of the algorithm, per token: (policy output, batch) -> (B,T) and metrics.
        total_steps: of the whole run, for the learning-rate schedule.
        optimizers: an optimizer and a scheduler to use instead of AdamW and the config's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: PolicyGradientConfig,
        runtime: Runtime,
        loss: Callable[[PolicyOutput, Experience], Loss],
        total_steps: int,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    ) -> None:
        self.args, self.runtime, self.loss = args, runtime, loss
        if args.disable_dropout:
            disable_dropout(model)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(model.to(runtime.device), args.temperature).eval()
        self.reference = Reference(self.policy) if args.beta > 0 else None
        self.trained = runtime.prepare(self.policy)
        self.optimizer = optimizers[0] or _adamw(model, args)
        self.scheduler: LRScheduler = optimizers[1] or get_scheduler(
            args.lr_scheduler_type, self.optimizer, args.warmup_steps, total_steps
        )

    def score(self, rollout: Rollout) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities (B,T) under the policy before its update, and under the reference.

        Each is None where the algorithm does not need it: the policy's with one update per rollout
        (the ratio is then 1 by construction) and no KL in the reward, the reference's without KL.
        """
        args, old, ref = self.args, None, None
        kl_in_reward = self.reference is not None and args.kl_placement == "reward"
        if kl_in_reward or args.updates_per_step > 1:
            old = self._logprobs(lambda batch: self.policy(batch).logprobs, rollout)
        if self.reference is not None:
            ref = self._logprobs(self.reference, rollout)
        return old, ref

    def update(self, experience: Experience, step: int, meter: Meter) -> dict[str, float]:
        """Every optimizer update on one rollout batch."""
        args = self.args
        norms = []
        rate = self.optimizer.param_groups[0]["lr"]
        self.policy.train()
        for iteration in range(args.num_iterations):
            # Draw d is in minibatch d mod num_mini_batches in every pass; only their order varies.
            for m in permutation(args.num_mini_batches, args.seed, step, iteration):
                rows = (experience.groups % args.num_mini_batches == m).nonzero().squeeze(1)
                self.accumulate(experience.select(rows), meter)
                norms.append(self._apply_gradient())
        self.scheduler.step()
        self.policy.eval()
        return {"grad_norm": sum(norms) / len(norms), "learning_rate": rate}

    def accumulate(self, minibatch: Experience, meter: Meter) -> None:
        """Add the gradient of one optimizer update to `.grad`, micro-batch by micro-batch."""
        args = self.args
        # Counted over the whole update and all ranks, so no split of the rows changes the gradient.
        count = self.runtime.total(weight_count(minibatch.action_mask, args.aggregation))
        micro_batches = list(self._micro_batches(minibatch))
        for i, (_, batch) in enumerate(micro_batches):
            with self.runtime.micro_batch(self.trained, last=i + 1 == len(micro_batches)):
                new: PolicyOutput = self.trained(batch)
                if batch.old_logprobs is None:
                    batch = dataclasses.replace(batch, old_logprobs=new.logprobs.detach())
                per_token, metrics = self.loss(new, batch)
                weights = token_weights(
                    batch.action_mask,
                    args.aggregation,
                    args.max_completion_length,
                    count,
                    per_token.dtype,
                )
                loss = (per_token * weights).sum()
                self.runtime.backward(loss)
            meter.add("loss", loss, 1 / (self.runtime.world * len(micro_batches)))
            self._measure(new, batch, metrics, meter)

    def _measure(
        self, new: PolicyOutput, batch: Experience, metrics: dict[str, Tensor], meter: Meter
    ) -> None:
        numbers = {"entropy": new.entropy, **metrics}
        if batch.ref_logprobs is not None and self.args.kl_placement == "loss":
            numbers["kl"] = kl_estimate(new.logprobs, batch.ref_logprobs, self.args.kl_estimator)
        for name, values in numbers.items():
            meter.add_masked(name, values, batch.action_mask)

    def _apply_gradient(self) -> float:
        norm = float(self.runtime.clip(self.policy.parameters(), self.args.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is not finite (norm {norm}); the weights were left as they were "
                "before this update. Lower learning_rate or max_grad_norm, or use dtype float32"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def _logprobs(self, score: Callable[[Rollout], Tensor], rollout: Rollout) -> Tensor:
        """What `score` gives, (B,T), micro-batch by micro-batch."""
        logprobs = torch.zeros_like(rollout.sampler_logprobs)
        for rows, batch in self._micro_batches(rollout):
            scored = score(batch)
            if rows is not None:
                logprobs[rows, : scored.shape[1]] = scored
        return logprobs

    def _micro_batches(self, batch: R) -> Iterator[tuple[Tensor | None, R]]:
        """Row indices and rows within the token budget; the same number on every process.

        A process with fewer adds blank rows (indices None), so that none waits for another.
        """
        chunks = batch.micro_batches(self.args.micro_batch_tokens)
        for rows in chunks:
            yield rows, batch.select(rows)
        for _ in range(self.runtime.most(len(chunks)) - len(chunks)):
            yield None, batch.blank_row()


def _adamw(model: PreTrainedModel, args: PolicyGradientConfig) -> AdamW:
    """AdamW; biases and norms (vectors) do not decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
