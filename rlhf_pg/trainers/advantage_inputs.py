"""What an advantage estimator looks at: rewards per token, and the scores of all ranks.

Shapes: B rows on this rank, N on all ranks, K sources of reward, T completion width.
"""

import torch
from torch import nn

from rlhf_pg.advantages import AdvantageInputs
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.kl import kl_estimate
from rlhf_pg.masking import whiten
from rlhf_pg.report.metrics import Meter, length_metrics, reward_metrics
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.running_stats import MovingAverage
from rlhf_pg.runtime import Runtime
from rlhf_pg.trainers.controllers import Controllers


def advantage_inputs(
    batch: Batch,
    shaping: Shaping,
    runtime: Runtime,
    args: PolicyGradientConfig,
    controllers: Controllers,
    moving_average: MovingAverage | None,
    meter: Meter,
) -> tuple[AdvantageInputs, dict[str, float]]:
    """Return the inputs of an estimator, but for a critic's, and metrics of rewards; collective.

    Args:
        batch: scored, by rewards and models.
        shaping: shapes the scores; its running statistics take in this step.
        controllers: have beta, the coefficient of a KL in the reward.
        moving_average: the baseline of an estimator that has one.
        meter: records the KL in the reward.
    """
    scores, mask = batch.scores, batch.action_mask
    assert scores is not None

    # Scores are shaped, and placed where their steps end.
    if (measured := shaping.measured(scores)) is not None:  # running statistics go first
        shaping.observe(runtime.gather(measured)[0])
    shaped = shaping(scores, batch)
    step_scores, step_mask = shaping.steps(shaped)

    # A KL in the reward is paid at every token: -beta KL_t.
    minus_kl = torch.zeros_like(batch.sampler_logprobs)
    if batch.ref_logprobs is not None and args.kl_placement == "reward":
        assert batch.old_logprobs is not None
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, args.kl_estimator)
        meter.add_masked("kl", kl, mask)
        minus_kl = -controllers["beta"] * kl
    rewards = minus_kl + step_scores
    if args.whiten_rewards:  # divided by their standard deviation over the step
        stats = runtime.mean_and_var(rewards, mask)
        rewards = whiten(rewards, mask, shift_mean=False, stats=stats)

    # Baselines compare the completions of all ranks.
    # A row without a token of its own has no score, and no KL either.
    kl_of_row = minus_kl.sum(1).masked_fill(~mask.any(1), torch.nan)
    per_row = [sum_step_scores(scores), sum_step_scores(shaped), kl_of_row[:, None]]
    everyone, rows = runtime.gather(torch.cat(per_row, dim=1))
    raw, trained = everyone.tensor_split([scores.shape[2]], dim=1)
    groups, _ = runtime.gather(batch.groups)
    lengths, _ = runtime.gather(batch.lengths())
    greedy_scores = None
    if batch.greedy is not None:  # (B,K) of each row's prompt; 0 for the KL
        assert batch.greedy.scores is not None
        paid = sum_step_scores(shaping(batch.greedy.scores, batch.greedy))
        _, place = torch.unique_consecutive(batch.groups, return_inverse=True)
        greedy_scores = nn.functional.pad(paid[place], (0, 1))
    inputs = AdvantageInputs(
        rewards=rewards,
        mask=mask,
        scores=trained,
        groups=groups,
        rows=rows,
        action_tokens=runtime.gather(mask.sum(1))[0],
        step_scores=step_scores,
        step_mask=step_mask,
        greedy_scores=greedy_scores,
        moving_average=moving_average.value if moving_average else 0.0,
    )

    metrics = reward_metrics(raw, trained[:, :-1], shaping.names, groups) | length_metrics(lengths)
    if greedy_scores is not None:
        metrics["rewards/greedy"] = runtime.gather(greedy_scores.nansum(1))[0].mean().item()
    if moving_average is not None:
        there = ~trained.isnan().all(1)
        metrics["return"] = trained.nansum(1)[there].mean().item()
        metrics["moving_average"] = moving_average.value
    if args.kl_controller != "fixed":  # follows the mean of the summed k1 of completions
        assert batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        sums = (batch.old_logprobs - batch.ref_logprobs).double().sum(1)  # 0 in masked slots
        both = torch.stack([sums.sum(), mask.any(1).sum().to(sums)])
        total, count = runtime.all_reduce_sum(both)
        metrics["kl/completion"] = float(total / count)
    return inputs, metrics
