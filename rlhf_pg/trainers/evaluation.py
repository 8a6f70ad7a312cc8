"""Scoring held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_pg.data import Prompts, batches
from rlhf_pg.metrics import length_metrics, reward_metrics

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer


def evaluate(
    trainer: PolicyGradientTrainer, prompts: Prompts, temperature: float
) -> dict[str, float]:
    """Sample one completion of every prompt, shared among the processes, and score it.

    Returns:
        Metrics over all processes, named as in training.
    """
    runtime, args = trainer.runtime, trainer.args
    scores, lengths = [], []
    # Every process goes through the same batches, be its share of one empty: none waits for ever.
    for batch in batches(range(len(prompts)), args.prompts_per_step * args.num_generations):
        mine = list(batch[runtime.rank :: runtime.world])
        # Negative draws: noise that training never uses.
        draws = [-1 - row for row in mine]
        samples = trainer.sample(prompts, mine, draws, 1, temperature)
        scores.append(trainer.reward(samples))
        lengths.append(samples.rollout.lengths())
    everyone, _ = runtime.gather(torch.cat(scores))
    metrics = reward_metrics(everyone, trainer.reward_weights.to(everyone), trainer.reward_names)
    metrics |= length_metrics(runtime.gather(torch.cat(lengths))[0])
    metrics.pop("tokens")
    return metrics
