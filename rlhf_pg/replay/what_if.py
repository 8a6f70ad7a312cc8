"""The completions of a step with other rewards, coefficients or losses, and the changes.

Shapes: B rows, T completion width. One process: gradients are compared tensor by tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.config.run import effect_of
from rlhf_pg.data import Batch
from rlhf_pg.replay.replay import Replay, computed_changes
from rlhf_pg.report.metrics import Meter, step_metrics
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers import PolicyGradientTrainer


@dataclass(frozen=True, kw_only=True)
class Side:
    """A step under one config."""

    rewards: Mapping[str, Sequence[float]]  # raw totals of completions by source; NaN for none
    advantages: Tensor  # (B,T)
    gradient: Mapping[str, Tensor]  # of the whole step at the weights before it, by tensor
    metrics: Mapping[str, float]  # of that pass


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A step with its own and with other settings."""

    step: int
    changes: Mapping[str, tuple[Any, Any]]  # the keys of the config that differ, with both values
    batch: Batch  # the completions
    was: Side
    would_be: Side

    def angle(self, name: str | None = None) -> float:
        """Return the angle in degrees between both gradients, or those of one tensor.

            arccos(<g, h> / (|g| |h|))

        NaN if one gradient is 0.
        """
        lengths = math.prod(self.lengths(name))
        if not lengths:
            return math.nan
        cosine = self._product(self.was, self.would_be, name) / lengths
        cosine = max(-1.0, min(1.0, cosine))
        return math.degrees(math.acos(cosine))

    def lengths(self, name: str | None = None) -> tuple[float, float]:
        """Return the norms of both gradients, or of those of one tensor."""
        was = self._product(self.was, self.was, name)
        would_be = self._product(self.would_be, self.would_be, name)
        return math.sqrt(was), math.sqrt(would_be)

    def _product(self, a: Side, b: Side, name: str | None) -> float:
        total = 0.0
        for tensor in self.was.gradient if name is None else [name]:
            x = a.gradient[tensor].double()
            y = b.gradient[tensor].double()
            total += float((x * y).sum())
        return total


def what_if(replay: Replay, other: PolicyGradientTrainer, step: int) -> WhatIf:
    """Compare a step with the same under the config of another trainer, which only computes
    rewards, if these differ; neither takes it. ValueError if there are several processes, no key
    differs, or a key differs that would have changed the completions.
    """
    trainer = replay.trainer
    other.on_resume(replay.run.config)
    changes = _changes(trainer, other, replay.has_episodes)
    replay.go_to(step - 1)
    for name, part in trainer.learner.parts.items():
        changes_in_training = name in ("model", "critic") or part.module.moves
        if name in other.learner.parts and changes_in_training:
            other.learner.parts[name].module.load_state_dict(part.module.state_dict())
    snapshot = trainer.checkpointer.snapshot()
    running = {name: dict(vars(record)) for name, record in other.running.items()}
    for name, record in snapshot["running"].items():
        if name in running and name not in changes:
            running[name] = record
    other.checkpointer.roll_back(snapshot | {"running": running})
    batch = replay.batch(step)

    def score(batch: Batch) -> Batch:
        if any(effect_of(key) == "rewards" for key in changes):
            return other.sampler.add_rewards(batch)
        raw = batch.scores[:, :, : trainer.shaping.functions]
        return batch.with_columns(scores=other.shaping.add_penalties(raw, batch))

    greedy = None
    if batch.greedy is not None:
        greedy = score(batch.greedy)
    would_be = _side(other, score(batch).with_columns(greedy=greedy))
    was = _side(trainer, batch)
    trainer.checkpointer.roll_back(snapshot)  # running statistics have changed
    return WhatIf(
        step=step,
        changes=changes,
        batch=batch,
        was=was,
        would_be=would_be,
    )


def _changes(
    trainer: PolicyGradientTrainer,
    other: PolicyGradientTrainer,
    has_episodes: bool,
) -> dict[str, tuple[Any, Any]]:
    """Return the differing keys; ValueError if they would change the completions."""
    if trainer.runtime.world > 1 or trainer.runtime.kind != "DDP":
        raise ValueError("replay with other keys runs in one process: use no launcher")
    before = trainer.resolved_args()
    after = other.resolved_args()
    changes = computed_changes(before, after)
    for key in changes:
        if effect_of(key) == "rewards" and has_episodes:
            raise ValueError(f"{key} cannot be changed for episodes, which are not played again")
    if after.estimator_traits.needs == "greedy" != before.estimator_traits.needs:
        raise ValueError(
            f"advantage_estimator {after.advantage_estimator} needs greedy completions: choose "
            "another"
        )
    return changes


def _side(trainer: PolicyGradientTrainer, batch: Batch) -> Side:
    """Estimate advantages, and compute the gradient of the whole step at the current weights."""
    meter = Meter()
    learner = trainer.learner
    batch = trainer.credit(trainer.infer(batch), meter)
    metrics = batch.metrics | step_metrics(batch, trainer.shaping.names, trainer.gather)
    learner.module.train()
    try:
        learner.accumulate(trainer.drop_truncated(batch), trainer.objective, meter)
        if learner.trains_critic_alone(trainer.state.step):
            learner.backend.zero_grad_of(learner.policy)
        gradient = {}
        for name, parameter in trainer.checkpointer.parameters.items():
            summed = learner.backend.gradient(parameter)
            if summed is not None:
                gradient[name] = summed.clone()
                continue
            if parameter.requires_grad:
                gradient[name] = torch.zeros_like(parameter)
    finally:
        learner.backend.discard_update()
        learner.module.eval()
    totals = sum_step_scores(batch.scores).T.tolist()
    return Side(
        rewards=dict(zip(trainer.shaping.names, totals, strict=True)),
        advantages=batch.advantages.detach(),
        gradient=gradient,
        metrics=metrics | meter.means(meter.sums()),
    )


def mean_advantages(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean advantage of each row, (B,) float64."""
    total = torch.where(mask, x, 0.0).double().sum(1)
    return total / mask.sum(1)
