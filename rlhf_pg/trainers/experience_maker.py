"""The second half of a step before the update: rewards per token, and the experience.

Shapes: B rows on this rank, N on all ranks, K sources of reward, T completion width.
"""

import dataclasses

import torch
from torch import Tensor, nn

from rlhf_pg.advantages import AdvantageInputs
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.records import Experience, Rollout
from rlhf_pg.kl import kl_estimate
from rlhf_pg.masking import whiten
from rlhf_pg.report.metrics import Meter, length_metrics, reward_metrics
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.running_stats import MovingAverage
from rlhf_pg.runtime import Runtime
from rlhf_pg.trainers.learner import ModelOutputs
from rlhf_pg.trainers.samples import ScoredSamples


def advantage_inputs(
    rollout: Rollout,
    scores: Tensor,
    outputs: ModelOutputs,
    shaping: Shaping,
    runtime: Runtime,
    args: PolicyGradientConfig,
    meter: Meter,
    *,
    kl_coef: float,
    values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    greedy: ScoredSamples | None = None,
    moving_average: MovingAverage | None = None,
) -> tuple[AdvantageInputs, dict[str, float]]:
    """Return the inputs of an estimator, and the metrics of rewards over all ranks.

    Args:
        scores: (B,T,K) raw.
        shaping: shapes the scores; its running statistics take in this step.
        meter: records the KL in the reward.
        kl_coef: beta, the coefficient of that KL.
        values, bootstrap_value: (B,T) and (B,) of a critic, in units of the reward.
        greedy: one greedy completion per group, for an estimator that needs them.
        moving_average: the baseline of an estimator that has one.
    """
    mask = rollout.action_mask
    if (measured := shaping.measured(scores)) is not None:  # running statistics go first
        shaping.observe(runtime.gather(measured)[0])
    shaped = shaping(scores, rollout)
    minus_kl = _minus_kl(rollout, outputs, args, kl_coef, meter)
    step_scores, step_mask = shaping.steps(shaped)
    # A row without a token of its own has no score, and no KL either.
    kl_of_row = minus_kl.sum(1).masked_fill(~mask.any(1), torch.nan)
    per_row = [sum_step_scores(scores), sum_step_scores(shaped), kl_of_row[:, None]]
    everyone, rows = runtime.gather(torch.cat(per_row, dim=1))
    raw, trained = everyone.tensor_split([scores.shape[2]], dim=1)
    groups, _ = runtime.gather(rollout.groups)
    lengths, _ = runtime.gather(rollout.lengths())
    rewards = minus_kl + step_scores
    if args.whiten_rewards:  # divided by their standard deviation over the step
        stats = runtime.mean_and_var(rewards, mask)
        rewards = whiten(rewards, mask, shift_mean=False, stats=stats)
    inputs = AdvantageInputs(
        rewards=rewards,
        mask=mask,
        scores=trained,
        groups=groups,
        rows=rows,
        action_tokens=runtime.gather(mask.sum(1))[0],
        values=values,
        bootstrap_value=bootstrap_value,
        step_scores=step_scores,
        step_mask=step_mask,
        greedy_scores=None if greedy is None else _of_greedy(greedy, shaping, rollout.groups),
        moving_average=moving_average.value if moving_average else 0.0,
    )
    metrics = reward_metrics(raw, trained[:, :-1], shaping.names, groups) | length_metrics(lengths)
    if args.kl_controller != "fixed":
        metrics["kl/completion"] = _kl_of_completions(runtime, outputs, mask)
    return inputs, metrics | _baseline_metrics(inputs, runtime, moving_average)


def build_experience(
    rollout: Rollout,
    scores: Tensor,
    outputs: ModelOutputs,
    advantages: Tensor,
    returns: Tensor | None,
    shaping: Shaping,
    runtime: Runtime,
    args: PolicyGradientConfig,
) -> Experience:
    """Join the rollout with all that the update needs.

    Args:
        scores: (B,T,K) raw.
        outputs: of the models, values in the critic's own units.
        advantages: (B,T), not yet whitened.
        returns: (B,T) targets of the critic, in its units; None without one.
    """
    mask = rollout.action_mask
    if args.normalize_advantages:
        advantages = whiten(advantages, mask, stats=runtime.mean_and_var(advantages, mask))
    positive = None
    if args.positive_nll_coef:
        positive = sum_step_scores(shaping.judged(scores)).nansum(1) > args.positive_nll_threshold
    experience = Experience.of(
        rollout,
        advantages=advantages,
        # With one update per rollout they are taken from that update's own forward pass, so the
        # ratio is exactly 1. They are kept only where the KL after the update is measured.
        old_logprobs=outputs.old_logprobs if args.compares_with_old else None,
        ref_logprobs=outputs.ref_logprobs,
        values=outputs.values,
        returns=returns,
        positive=positive,
    )
    if args.mask_truncated_completions:
        # They count in every statistic above, and models may still attend to them. Only the losses
        # of policy and critic leave them out.
        mask = mask & ~rollout.truncated[:, None]
        experience = dataclasses.replace(experience, action_mask=mask)
    return experience


def _minus_kl(
    rollout: Rollout,
    outputs: ModelOutputs,
    args: PolicyGradientConfig,
    kl_coef: float,
    meter: Meter,
) -> Tensor:
    """Compute -beta KL_t, (B,T), for a KL in the reward; otherwise 0."""
    if outputs.ref_logprobs is None or args.kl_placement != "reward":
        return torch.zeros_like(rollout.sampler_logprobs)
    assert outputs.old_logprobs is not None
    kl = kl_estimate(outputs.old_logprobs, outputs.ref_logprobs, args.kl_estimator)
    meter.add_masked("kl", kl, rollout.action_mask)
    return -kl_coef * kl


def _of_greedy(greedy: ScoredSamples, shaping: Shaping, groups: Tensor) -> Tensor:
    """Return the reward (B,K) of the greedy completion of each row's prompt; 0 for the KL.

    Args:
        greedy: one row per group.
        groups: (B,) of the rows.
    """
    paid = sum_step_scores(shaping(greedy.scores, greedy.samples.rollout))
    _, place = torch.unique_consecutive(groups, return_inverse=True)
    return nn.functional.pad(paid[place], (0, 1))


def _baseline_metrics(
    inputs: AdvantageInputs, runtime: Runtime, moving_average: MovingAverage | None
) -> dict[str, float]:
    """Report the greedy baseline, the moving average, and the mean return that it follows."""
    metrics = {}
    if inputs.greedy_scores is not None:
        greedy, _ = runtime.gather(inputs.greedy_scores.nansum(1))
        metrics["rewards/greedy"] = greedy.mean().item()
    if moving_average is not None:
        there = ~inputs.scores.isnan().all(1)
        metrics["return"] = inputs.scores.nansum(1)[there].mean().item()
        metrics["moving_average"] = inputs.moving_average
    return metrics


def _kl_of_completions(runtime: Runtime, outputs: ModelOutputs, mask: Tensor) -> float:
    """Average the summed k1 over the completions of all processes; adaptive betas follow it."""
    assert outputs.old_logprobs is not None
    assert outputs.ref_logprobs is not None
    sums = (outputs.old_logprobs - outputs.ref_logprobs).double().sum(1)  # 0 in masked slots
    total, count = runtime.all_reduce_sum(torch.stack([sums.sum(), mask.any(1).sum().to(sums)]))
    return float(total / count)
