"""From samples and their scores to experience: what every model says of them, and advantages.

Shapes: B rows on this rank, N on all ranks, K sources of reward, T completion width.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_pg.advantages import NEED_GRADIENTS, AdvantageInputs
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.records import Experience, Rollout
from rlhf_pg.kl import kl_estimate
from rlhf_pg.masking import whiten
from rlhf_pg.report.metrics import Meter, length_metrics, reward_metrics
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.running_stats import RunningMoments
from rlhf_pg.runtime import Runtime
from rlhf_pg.trainers.learner import ModelOutputs
from rlhf_pg.trainers.samples import ScoredSamples

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer


def make_experience(
    trainer: PolicyGradientTrainer,
    rollout: Rollout,
    scores: Tensor,
    meter: Meter,
    greedy: ScoredSamples | None = None,
) -> tuple[Experience, dict[str, float]]:
    """See `PolicyGradientTrainer.make_experience`."""
    args, runtime, mask = trainer.args, trainer.runtime, rollout.action_mask
    scored = trainer.learner.score(rollout)
    predicted = scored.values  # in the critic's own units
    scored = _denormalized(scored, trainer.value_moments, mask)
    signals, metrics = _signals(trainer, rollout, scores, scored, meter, greedy)
    advantages = trainer.advantages(signals)
    if args.kl_controller != "fixed":
        metrics["kl/completion"] = _kl_of_completions(runtime, scored, mask)
    returns = None
    if scored.values is not None:
        returns = trainer.returns(signals, advantages)
        metrics["explained_variance"] = _explained_variance(runtime, scored.values, returns, mask)
        returns = _normalized(runtime, returns, trainer.value_moments, mask)
    if args.normalize_advantages:
        advantages = whiten(advantages, mask, stats=_mean_and_var(runtime, advantages, mask))
    experience = Experience.of(
        rollout,
        advantages=advantages,
        # With one update per rollout the ratio is 1 by construction, not up to rounding; unless
        # something is to know how far that update went.
        old_logprobs=scored.old_logprobs if args.compares_with_old else None,
        ref_logprobs=scored.ref_logprobs,
        values=predicted,
        returns=returns,
        positive=_positive(trainer, scores),
    )
    return _without_truncated(experience, args), metrics


def _signals(
    trainer: PolicyGradientTrainer,
    rollout: Rollout,
    scores: Tensor,
    scored: ModelOutputs,
    meter: Meter,
    greedy: ScoredSamples | None,
) -> tuple[AdvantageInputs, dict[str, float]]:
    """What an estimator may look at, from the raw scores (B,T,K); and the metrics of rewards."""
    runtime, mask = trainer.runtime, rollout.action_mask
    minus_kl = _minus_kl(trainer, rollout, scored, meter)
    trainer.shaping.observe(scores, runtime)
    shaped = trainer.shaping(scores, rollout)
    step_scores, step_mask = trainer.shaping.steps(shaped)
    rewards = minus_kl + step_scores
    if trainer.args.whiten_rewards:
        stats = _mean_and_var(runtime, rewards, mask)
        rewards = whiten(rewards, mask, shift_mean=False, stats=stats)
    # A row without a token of its own has no score, and no KL either.
    kl_of_row = minus_kl.sum(1).masked_fill(~mask.any(1), torch.nan)
    per_row = [sum_step_scores(scores), sum_step_scores(shaped), kl_of_row[:, None]]
    everyone, rows = runtime.gather(torch.cat(per_row, dim=1))
    raw, trained = everyone.tensor_split([scores.shape[2]], dim=1)
    squares = None
    if trainer.args.advantage_estimator in NEED_GRADIENTS:
        squares, _ = runtime.gather(trainer.learner.squared_gradients(rollout))
    groups, _ = runtime.gather(rollout.groups)
    lengths, _ = runtime.gather(rollout.lengths())
    signals = AdvantageInputs(
        rewards=rewards,
        mask=mask,
        scores=trained,
        groups=groups,
        rows=rows,
        action_tokens=runtime.gather(mask.sum(1))[0],
        squared_gradients=squares,
        values=scored.values,
        bootstrap_value=trainer.bootstrap_value(rollout, scored.end_values),
        step_scores=step_scores,
        step_mask=step_mask,
        greedy_scores=None if greedy is None else _of_greedy(trainer, greedy, rollout.groups),
        moving_average=trainer.moving_average.value if trainer.moving_average else 0.0,
    )
    metrics = reward_metrics(raw, trained[:, :-1], trainer.reward_names, groups)
    return signals, metrics | length_metrics(lengths) | _baseline_metrics(trainer, signals)


def _minus_kl(
    trainer: PolicyGradientTrainer, rollout: Rollout, scored: ModelOutputs, meter: Meter
) -> Tensor:
    """-beta KL_t, (B,T), where the KL is paid in the reward; otherwise 0."""
    args = trainer.args
    if scored.ref_logprobs is None or args.kl_placement != "reward":
        return torch.zeros_like(rollout.sampler_logprobs)
    assert scored.old_logprobs is not None
    kl = kl_estimate(scored.old_logprobs, scored.ref_logprobs, args.kl_estimator)
    meter.add_masked("kl", kl, rollout.action_mask)
    return -trainer.coefficients["beta"] * kl


def _positive(trainer: PolicyGradientTrainer, scores: Tensor) -> Tensor | None:
    """(B,) what `positive_nll_coef` is for: the reward functions together say enough of it."""
    if trainer.args.positive_nll_coef == 0:
        return None
    said = sum_step_scores(trainer.shaping.judged(scores)).nansum(1)
    return said > trainer.args.positive_nll_threshold


def _without_truncated(experience: Experience, args: PolicyGradientConfig) -> Experience:
    """With the tokens that train as its action tokens.

    A completion that was cut off counts in every statistic up to here, and stays what a model may
    attend to: only the loss, of the policy and of the critic, does not see it.
    """
    if not args.mask_truncated_completions:
        return experience
    mask = experience.action_mask & ~experience.truncated[:, None]
    return dataclasses.replace(experience, action_mask=mask)


def _of_greedy(trainer: PolicyGradientTrainer, greedy: ScoredSamples, groups: Tensor) -> Tensor:
    """(B,K) what the greedy completion of each row's prompt is paid; nothing for its KL, the last.

    Args:
        greedy: one row per group.
        groups: (B,) of the rows.
    """
    paid = sum_step_scores(trainer.shaping(greedy.scores, greedy.samples.rollout))
    _, place = torch.unique_consecutive(groups, return_inverse=True)
    return nn.functional.pad(paid[place], (0, 1))


def _baseline_metrics(trainer: PolicyGradientTrainer, signals: AdvantageInputs) -> dict[str, float]:
    """Baselines from beyond the batch, and the mean return that the moving average follows."""
    metrics = {}
    if signals.greedy_scores is not None:
        greedy, _ = trainer.runtime.gather(signals.greedy_scores.nansum(1))
        metrics["rewards/greedy"] = greedy.mean().item()
    if trainer.moving_average is not None:
        there = ~signals.scores.isnan().all(1)
        metrics["return"] = signals.scores.nansum(1)[there].mean().item()
        metrics["moving_average"] = signals.moving_average
    return metrics


def _denormalized(
    scored: ModelOutputs, moments: RunningMoments | None, mask: Tensor
) -> ModelOutputs:
    """The critic's values in units of the reward."""
    if moments is None or scored.values is None or scored.end_values is None:
        return scored
    values = torch.where(mask, moments.denormalize(scored.values), 0.0)
    return scored._replace(values=values, end_values=moments.denormalize(scored.end_values))


def _normalized(
    runtime: Runtime, returns: Tensor, moments: RunningMoments | None, mask: Tensor
) -> Tensor:
    """The critic's targets in the units that it predicts, once the moments have seen them."""
    if moments is None:
        return returns
    mean, var = _mean_and_var(runtime, returns, mask)
    if var.isfinite():  # else the updates that have these returns are skipped
        moments.update(float(runtime.all_reduce_sum(mask.sum())), float(mean), float(var))
    return torch.where(mask, moments.normalize(returns), 0.0)


def _kl_of_completions(runtime: Runtime, scored: ModelOutputs, mask: Tensor) -> float:
    """Mean over the completions of all processes of k1 summed: what moves beta."""
    assert scored.old_logprobs is not None
    assert scored.ref_logprobs is not None
    sums = (scored.old_logprobs - scored.ref_logprobs).double().sum(1)  # 0 in masked slots
    total, count = runtime.all_reduce_sum(torch.stack([sums.sum(), mask.any(1).sum().to(sums)]))
    return float(total / count)


def _mean_and_var(runtime: Runtime, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the True slots of all processes, in float64."""
    wide = torch.where(mask, x, 0.0).double()
    total, count = runtime.all_reduce_sum(torch.stack([wide.sum(), mask.sum().double()]))
    mean = total / count
    return mean, runtime.all_reduce_sum(torch.where(mask, (wide - mean) ** 2, 0.0).sum()) / count


def _explained_variance(runtime: Runtime, values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that knows no more than a mean."""
    _, unexplained = _mean_and_var(runtime, returns - values, mask)
    _, var = _mean_and_var(runtime, returns, mask)
    return (1 - unexplained / var).item()
