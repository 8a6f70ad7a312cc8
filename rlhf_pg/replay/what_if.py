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
from rlhf_pg.report.metrics import Meter
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
        product = self._product(self.was, self.would_be, name)
        return math.degrees(math.acos(max(-1.0, min(1.0, product / lengths))))

    def lengths(self, name: str | None = None) -> tuple[float, float]:
        """Return the norms of both gradients, or of those of one tensor."""
        was, now = (self._product(side, side, name) for side in (self.was, self.would_be))
        return math.sqrt(was), math.sqrt(now)

    def _product(self, a: Side, b: Side, name: str | None) -> float:
        names = self.was.gradient if name is None else [name]
        return sum(float((a.gradient[n].double() * b.gradient[n].double()).sum()) for n in names)


def what_if(replay: Replay, other: PolicyGradientTrainer, step: int) -> WhatIf:
    """Compare a step with the same under the config of another trainer, which only computes
    rewards, if these differ; neither takes it. ValueError if there are several processes, no key
    differs, or a key differs that would have changed the completions.
    """
    own = replay.trainer
    other.on_resume(replay.run.config)
    changes = _changes(own, other, replay.has_episodes)
    replay.go_to(step - 1)
    for name, part in own.learner.parts.items():
        if name in other.learner.parts and (name in ("model", "critic") or part.module.moves):
            other.learner.parts[name].module.load_state_dict(part.module.state_dict())
    numbers = own.checkpointer.numbers()
    running = {name: dict(vars(record)) for name, record in other.running.items()}
    for name in running.keys() & numbers["running"].keys() - changes.keys():
        running[name] = numbers["running"][name]
    other.checkpointer.put_back(numbers | {"running": running})
    batch = replay.batch(step)

    def scored(batch: Batch) -> Batch:
        if any(effect_of(key) == "rewards" for key in changes):
            return other.sampler.add_rewards(batch)
        raw = batch.scores[:, :, : own.shaping.functions]
        return batch.with_columns(scores=other.shaping.add_penalties(raw, batch))

    greedy = None if batch.greedy is None else scored(batch.greedy)
    would_be = _side(other, scored(batch).with_columns(greedy=greedy))
    was = _side(own, batch)
    own.checkpointer.put_back(numbers)  # running statistics have changed
    return WhatIf(step=step, changes=changes, batch=batch, was=was, would_be=would_be)


def _changes(
    own: PolicyGradientTrainer, other: PolicyGradientTrainer, has_episodes: bool
) -> dict[str, tuple[Any, Any]]:
    """Return the differing keys; ValueError if they would change the completions."""
    if own.runtime.world > 1 or own.runtime.kind != "DDP":
        raise ValueError("replay with other keys runs in one process: use no launcher")
    before = own.resolved_args()
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
    batch, metrics = trainer.estimate(trainer.score(batch), meter)
    learner.module.train()
    try:
        learner.accumulate(trainer.drop_truncated(batch), meter)
        if learner.trains_critic_alone(trainer.state.step):
            learner.backend.zero_grad_of(learner.policy)
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in trainer.checkpointer.parameters.items()
            if p.requires_grad
        }
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
    return torch.where(mask, x, 0.0).double().sum(1) / mask.sum(1)
