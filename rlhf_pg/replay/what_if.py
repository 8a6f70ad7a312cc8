"""The same completions under other rewards, coefficients or losses, and what would have changed.

Shapes: B rows, T completion width. One process: gradients are compared tensor by tensor.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.advantages import NEED_GREEDY
from rlhf_pg.data.records import Experience
from rlhf_pg.losses import token_weights, weight_count
from rlhf_pg.replay.again import Replay
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import StepTokens
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers import PolicyGradientTrainer
from rlhf_pg.trainers.samples import Samples, ScoredBatch, ScoredSamples

REWARDS = ("reward_funcs", "reward_options", "reward_model_name_or_path", "task")
# Keys by which other completions would have been sampled, or another model trained.
OTHER_RUN = (
    *("model_name_or_path", "trust_remote_code", "attn_implementation", "model_init_kwargs"),
    *("task", "dataset_name", "dataset_columns", "seed", "dtype", "prompts_per_step"),
    *("num_generations", "max_completion_length", "temperature", "top_k", "top_p", "min_p", "stop"),
    *("use_peft", "lora_r", "lora_target_modules", "critic", "value_model_name_or_path"),
    *("dynamic_sampling_rounds", "rollout_engine", "cpu_threads"),
)
GRADIENT, UPDATE = "gradient", "change of the weights"


@dataclass(frozen=True, kw_only=True)
class Side:
    """A step under one config.

    Attributes:
        rewards: raw total scores of the completions by source; NaN where one does not apply.
        advantages: (B,T).
        pull: (B,T) by how much the loss falls as the log-probability of a token rises, before the
            first update; times the number of tokens, so that its size is that of an advantage.
        gradient: of the whole step at the weights before it, by tensor.
        update: what all its updates have changed, by tensor.
        metrics: of the step.
    """

    rewards: Mapping[str, Sequence[float]]
    advantages: Tensor
    pull: Tensor
    gradient: Mapping[str, Tensor]
    update: Mapping[str, Tensor]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A step as it was and as it would have been.

    Attributes:
        changes: the keys of the config that differ, with both values.
        mask: (B,T) the tokens that the policy chose.
        completions: records for readers.
        tokens: of them, with the numbers of the step as it was.
    """

    step: int
    changes: Mapping[str, tuple[Any, Any]]
    mask: Tensor
    completions: Sequence[Mapping[str, Any]]
    tokens: StepTokens
    was: Side
    would_be: Side

    def angle(self, which: str, name: str | None = None) -> float:
        """Return the angle in degrees between both gradients or updates, or those of one tensor.

            arccos(<g, h> / (|g| |h|))

        NaN where one of them is 0.
        """
        before, after = self._pair(which, name)
        product = sum(float((a * b).sum()) for a, b in zip(before, after, strict=True))
        lengths = _length(before) * _length(after)
        return (
            math.degrees(math.acos(max(-1.0, min(1.0, product / lengths)))) if lengths else math.nan
        )

    def lengths(self, which: str, name: str | None = None) -> tuple[float, float]:
        """Return the lengths of both gradients or updates, or those of one tensor."""
        before, after = self._pair(which, name)
        return _length(before), _length(after)

    def _pair(self, which: str, name: str | None) -> tuple[list[Tensor], list[Tensor]]:
        sides = []
        for side in (self.was, self.would_be):
            tensors = side.gradient if which == GRADIENT else side.update
            names = list(self.was.gradient) if name is None else [name]
            sides.append([tensors[one].double() for one in names])
        return sides[0], sides[1]


def what_if(replay: Replay, other: PolicyGradientTrainer, step: int) -> WhatIf:
    """Make a step again as it was, and with the config of another trainer.

    The trainer of the run has taken the step afterwards.

    Args:
        replay: of the run.
        other: the trainer of the run, with other keys. It gets the state of the run before the step
            and the completions of the run; it is asked for nothing but their rewards, where those
            differ.

    Raises:
        ValueError: there are several processes, a key differs by which other completions would have
            been sampled, or nothing differs.
    """
    own = replay.trainer
    other.on_resume(replay.run.config)
    changes = _checked(own, other)
    other.learner.skipped.keeps = False
    replay.go_to(step - 1)
    _copy_state(own, other, changes)
    batch, meter = replay.collect(step), Meter()
    would_be, _ = _side(other, _scored_by(other, own, batch, changes), Meter())
    was, experience = _side(own, batch, meter)
    own.records_all = True
    try:
        record = own.record(batch, experience)
    finally:
        own.records_all = False
    own.finish_step(batch, dict(was.metrics), meter)
    assert record.tokens is not None
    return WhatIf(
        step=step,
        changes=changes,
        mask=batch.rollout.action_mask,
        completions=record.completions,
        tokens=record.tokens,
        was=was,
        would_be=would_be,
    )


def _checked(
    own: PolicyGradientTrainer, other: PolicyGradientTrainer
) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ, if the completions of one run may be those of the other."""
    if own.runtime.world > 1 or own.runtime.kind != "DDP":
        raise ValueError(
            "what would have been is computed by one process: launch it without others"
        )
    before, after = (
        dataclasses.asdict(own.resolved_args()),
        dataclasses.asdict(other.resolved_args()),
    )
    changes = {
        key: (before[key], after[key])
        for key in before
        if key != "output_dir" and before[key] != after[key]
    }
    for key in OTHER_RUN:
        if key in changes:
            raise ValueError(
                f"{key} cannot be changed for completions that are there: it makes another run; "
                "train that, and compare the two by rlhf-pg compare"
            )
    if (
        after["advantage_estimator"] in NEED_GREEDY
        and before["advantage_estimator"] not in NEED_GREEDY
    ):
        raise ValueError(
            f"advantage_estimator {after['advantage_estimator']} needs greedy completions, which "
            "the run did not sample: choose another"
        )
    if not changes:
        raise ValueError("no key differs from the run's: name one, such as --beta 0.1")
    return changes


def _copy_state(
    own: PolicyGradientTrainer, other: PolicyGradientTrainer, changes: Mapping[str, Any]
) -> None:
    """Give the other trainer the weights, moments and counters of the run."""
    for name, part in own.learner.parts.items():
        if name in other.learner.parts and (name != "reference" or part.module.moves):
            theirs = part.module.state_dict()
            other.learner.parts[name].module.load_state_dict(theirs)
    names = {p: name for name, p in own.checkpointer.parameters.items()}
    theirs, known = other.checkpointer.parameters, own.learner.trained.state()
    other.learner.trained.load_state(
        [(theirs[names[p]], key, value.clone()) for p, key, value in known if names[p] in theirs]
    )
    numbers = own.checkpointer.numbers()
    moving = {name: dict(vars(record)) for name, record in other.running.items()}
    for name in moving.keys() & numbers["running"].keys() - changes.keys():
        moving[name] = numbers["running"][name]
    other.checkpointer.put_back(numbers | {"running": moving})


def _scored_by(
    other: PolicyGradientTrainer,
    own: PolicyGradientTrainer,
    batch: ScoredBatch,
    changes: Mapping[str, Any],
) -> ScoredBatch:
    """Return a batch of the run with the scores that the other trainer would have."""
    asks = any(key in changes for key in REWARDS)

    def scored(samples: Samples, scores: Tensor) -> ScoredSamples:
        if asks:
            return other.collector.scored(dataclasses.replace(samples, begun={}))
        raw = scores[:, :, : own.shaping.functions]
        return ScoredSamples(samples, other.shaping.penalized(raw, samples.rollout))

    other.collector.outside.begin()
    samples, scores = scored(batch.samples, batch.scores)
    greedy = None if batch.greedy is None else scored(*batch.greedy)
    return dataclasses.replace(batch, samples=samples, scores=scores, greedy=greedy)


def _side(
    trainer: PolicyGradientTrainer, batch: ScoredBatch, meter: Meter
) -> tuple[Side, Experience]:
    """Make the second half of a step, and look at what it does."""
    experience, metrics = trainer.make_experience(batch.rollout, batch.scores, meter, batch.greedy)
    pull = _pull(trainer, experience)
    gradient = _gradient(trainer, experience)
    parameters = trainer.checkpointer.parameters
    before = {name: parameters[name].detach().clone() for name in gradient}
    trainer.learner.log = trainer.recorder.watch(experience)
    metrics |= trainer.update(experience, meter)
    metrics |= meter.means(meter.sums())
    totals = sum_step_scores(batch.scores).T.tolist()
    side = Side(
        rewards=dict(zip(trainer.reward_names, totals, strict=True)),
        advantages=experience.advantages.detach(),
        pull=pull,
        gradient=gradient,
        update={name: parameters[name].detach() - old for name, old in before.items()},
        metrics=metrics,
    )
    return side, experience


def _gradient(trainer: PolicyGradientTrainer, experience: Experience) -> dict[str, Tensor]:
    """Compute the gradient of a whole step at the present weights, by parameter, and drop it."""
    learner, parameters = trainer.learner, trainer.checkpointer.parameters
    learner.module.train()
    try:
        learner.accumulate(experience, Meter())
        return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    finally:
        learner.trained.discard_update()
        learner.module.eval()


def _pull(trainer: PolicyGradientTrainer, experience: Experience) -> Tensor:
    """Compute by how much each token is pulled up, (B,T): minus the gradient of the loss by its
    log-probability, times the number of tokens; the entropy bonus is left out.
    """
    learner, args = trainer.learner, trainer.args
    count = weight_count(experience.action_mask, args.aggregation)
    tokens = experience.action_mask.sum()
    pull = torch.zeros_like(experience.sampler_logprobs)
    for indices, batch in learner.micro_batches(experience):
        if indices is None:
            continue
        with torch.no_grad():
            seen = learner.trained(batch)
        logprobs = seen.logprobs.detach().requires_grad_()
        if batch.old_logprobs is None:
            batch = dataclasses.replace(batch, old_logprobs=logprobs.detach())
        per_token, _ = trainer.loss(seen._replace(logprobs=logprobs), batch)
        weights = token_weights(
            *(batch.action_mask, args.aggregation, args.max_completion_length, count),
            per_token.dtype,
        )
        [gradient] = torch.autograd.grad((per_token * weights).sum(), logprobs)
        pull[indices, : gradient.shape[1]] = -gradient * tokens
    return pull


def _length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in tensors))
