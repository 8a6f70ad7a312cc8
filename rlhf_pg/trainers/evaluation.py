"""Scoring held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_pg.data import Prompts, batches
from rlhf_pg.metrics import length_metrics, reward_metrics
from rlhf_pg.rewards import totals

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer


def evaluate(
    trainer: PolicyGradientTrainer, prompts: Prompts, temperature: float
) -> dict[str, float]:
    """Sample one completion of every prompt, shared among the processes, and score it.

    Returns:
        Metrics over all processes, named as in training; `rlhf_pg.trainers.shaping` says of which
        scores.
    """
    runtime, args = trainer.runtime, trainer.args
    rows, lengths = [], []
    # Every process goes through the same batches, be its share of one empty: none waits for ever.
    for batch in batches(range(len(prompts)), args.prompts_per_step * args.num_generations):
        mine = list(batch[runtime.rank :: runtime.world])
        # Negative draws: noise that training never uses.
        draws = [-1 - row for row in mine]
        samples = trainer.sample(prompts, mine, draws, 1, temperature)
        scores = trainer.reward(samples)
        shaped = trainer.shaping(scores, samples.rollout, normalize=False)
        rows.append(torch.cat([totals(scores), totals(shaped)], dim=1))
        lengths.append(samples.rollout.lengths())
    everyone, _ = runtime.gather(torch.cat(rows))
    raw, trained = everyone.chunk(2, dim=1)
    metrics = reward_metrics(raw, trained, trainer.reward_names)
    metrics |= length_metrics(runtime.gather(torch.cat(lengths))[0])
    metrics.pop("tokens")
    return metrics
