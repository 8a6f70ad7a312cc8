"""What a step trains on: completions of its prompts and their scores, with whatever is drawn again.

Shapes: B rows on this rank, T completion width, K sources of reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhf_pg.advantages import NEED_GREEDY, group_stats, total_scores
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers.samples import Samples, ScoredSamples

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step trains on; the plain numbers are those of all ranks."""

    judged: ScoredSamples
    draws: int  # prompts drawn for it
    greedy: ScoredSamples | None = None  # one greedy completion per group, for a baseline
    other_tokens: int = 0  # sampled, prompts included, and not trained on
    metrics: dict[str, float] = field(default_factory=dict)


def draw_batch(trainer: PolicyGradientTrainer, meter: Meter) -> Batch:
    """`prompts_per_step` groups of the prompts that are next, sampled and rewarded.

    Raises:
        ValueError: a reward function failed; the same prompts are then next.
    """
    args = trainer.args
    if args.dynamic_sampling_rounds:
        batch = _with_spread(trainer, meter)
    else:
        draws = range(trainer.state.draws, trainer.state.draws + args.prompts_per_step)
        batch = Batch(judged=_draw(trainer, draws, meter), draws=len(draws))
    return _with_greedy(trainer, batch, meter) if args.advantage_estimator in NEED_GREEDY else batch


def _draw(trainer: PolicyGradientTrainer, draws: range, meter: Meter) -> ScoredSamples:
    failpoint("rollout")
    with meter.time("rollout"):
        samples = trainer.roll_out(draws)
    failpoint("reward")
    with meter.time("reward"):
        return ScoredSamples(samples, trainer.reward(samples))


# ------------------------------------------------------------------------------ dynamic sampling


def _with_spread(trainer: PolicyGradientTrainer, meter: Meter) -> Batch:
    """Dynamic sampling (DAPO; Yu et al. 2025, section 3.2).

    Groups to whose completions the reward functions give one total score (Eq. 11) are set aside,
    whatever penalties make of it: by its length alone no answer is right. As many new prompts are
    drawn, for `dynamic_sampling_rounds` rounds at most. What is missing then is filled up with the
    earliest of the groups set aside, so every step has as many. The groups are numbered anew, from
    the first draw of the step: their minibatches are as large as without all this.
    """
    args, runtime, start = trainer.args, trainer.runtime, trainer.state.draws
    parts: list[ScoredSamples] = []
    kept: list[int] = []
    aside: list[int] = []
    end = start
    while len(kept) < args.prompts_per_step and len(parts) <= args.dynamic_sampling_rounds:
        draws = range(end, end + args.prompts_per_step - len(kept))
        parts.append(_draw(trainer, draws, meter))
        constant = _constant_groups(trainer, parts[-1])
        kept += [draw for draw in draws if draw not in constant]
        aside += [draw for draw in draws if draw in constant]
        end = draws.stop
    chosen = sorted(kept + aside[: args.prompts_per_step - len(kept)])
    places = {draw: start + i for i, draw in enumerate(chosen)}
    judged = _chosen(parts, places, trainer.processing_class.pad_token_id)
    sampled = sum(int(runtime.all_reduce_sum(part.samples.num_tokens)) for part in parts)
    return Batch(
        judged=judged,
        draws=end - start,
        other_tokens=sampled - int(runtime.all_reduce_sum(judged.samples.num_tokens)),
        metrics={
            "sampling/rounds": len(parts) - 1,
            "sampling/kept_fraction": len(kept) / (end - start),
        },
    )


def _constant_groups(trainer: PolicyGradientTrainer, judged: ScoredSamples) -> set[int]:
    """The groups of all ranks whose completions have one total score, before penalties and KL."""
    rollout = judged.samples.rollout
    paid, _ = trainer.runtime.gather(sum_step_scores(trainer.shaping.judged(judged.scores)))
    groups, _ = trainer.runtime.gather(rollout.groups)
    # On the CPU, where sums have one order: processes that disagreed would wait for ever.
    paid, groups = paid.cpu(), groups.cpu()
    scores = total_scores(paid, groups)
    constant = group_stats(scores, ~scores.isnan(), groups).constant
    return set(groups[constant].tolist())


def _chosen(
    parts: Sequence[ScoredSamples], places: Mapping[int, int], pad_token_id: int
) -> ScoredSamples:
    """The groups of all rounds that have a place, under its number, in the order of their draws."""
    together = Samples.concat([part.samples for part in parts], pad_token_id)
    samples, rows = together.renumbered(places)
    width = together.rollout.completion_ids.shape[1]
    scores = torch.cat([_widened(part.scores, width) for part in parts])
    return ScoredSamples(samples, scores[rows, : samples.rollout.completion_ids.shape[1]])


def _widened(scores: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - scores.shape[1]
    return nn.functional.pad(scores, (0, 0, 0, missing), value=torch.nan)


# ------------------------------------------------------------------------------- greedy baseline


def _with_greedy(trainer: PolicyGradientTrainer, batch: Batch, meter: Meter) -> Batch:
    """A greedy completion of every prompt, with its scores, from which only a baseline is made."""
    samples = batch.judged.samples
    firsts = samples.firsts()
    rows = [samples.rows[i] for i in firsts]
    draws = samples.rollout.groups[firsts].tolist()
    with meter.time("rollout"):
        greedy = trainer.sample(trainer.train_prompts, rows, draws, n=1, temperature=0.0)
    with meter.time("reward"):
        judged = ScoredSamples(greedy, trainer.reward(greedy))
    tokens = batch.other_tokens + int(trainer.runtime.all_reduce_sum(greedy.num_tokens))
    return dataclasses.replace(batch, greedy=judged, other_tokens=tokens)
