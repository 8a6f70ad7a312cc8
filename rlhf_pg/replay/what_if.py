"""The completions of a step with other rewards, coefficients or losses, and the changes.

Shapes: B rows, T completion width. One process: gradients are compared tensor by tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.advantages import NEED_GREEDY
from rlhf_pg.data import Batch
from rlhf_pg.replay.replay import Replay
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers import PolicyGradientTrainer

REWARDS = ("reward_funcs", "reward_options", "reward_model_name_or_path", "task")
# Keys that would change the completions or the model.
OTHER_RUN = (
    *("model_name_or_path", "trust_remote_code", "attn_implementation", "model_init_kwargs"),
    *("task", "dataset_name", "dataset_columns", "seed", "dtype", "prompts_per_step"),
    *("num_generations", "max_completion_length", "temperature", "top_k", "top_p", "min_p", "stop"),
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules"),
    *(
        "critic",
        "value_model_name_or_path",
        "normalize_values",
        "dynamic_sampling_rounds",
        "rollout_engine",
    ),
    *("teacher_model_name_or_path", "privileged_prompt"),
    *("chat_template", "chat_template_date", "eos_token"),
)


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
        if any(key in changes for key in REWARDS):
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
    before, after = (asdict(one.resolved_args()) for one in (own, other))
    others = [key for key in before if key != "output_dir" and before[key] != after[key]]
    changes = {key: (before[key], after[key]) for key in others}
    for key in changes:
        if key in OTHER_RUN:
            raise ValueError(f"{key} cannot be changed for existing completions: train another run")
        if key in REWARDS and has_episodes:
            raise ValueError(f"{key} cannot be changed for episodes, which are not played again")
    estimator = after["advantage_estimator"]
    if estimator in NEED_GREEDY and before["advantage_estimator"] not in NEED_GREEDY:
        raise ValueError(
            f"advantage_estimator {estimator} needs greedy completions: choose another"
        )
    if not changes:
        raise ValueError("no key differs from the run's: name one, such as --beta 0.1")
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
