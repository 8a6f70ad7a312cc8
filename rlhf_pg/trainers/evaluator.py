"""Evaluation: completions of held-out prompts are sampled and scored."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.data.chat import text_of
from rlhf_pg.data.prompts import Prompts, batches
from rlhf_pg.report.metrics import length_metrics, reward_metrics
from rlhf_pg.report.pass_at_k import majority_score, pass_at_k
from rlhf_pg.rewards import Rewards, sum_step_scores
from rlhf_pg.trainers.collector import Collector

Answer = Callable[[Any], Hashable]


def stripped_text(completion: Any) -> str:
    """Return the stripped text of a completion, or of its last message; "" if it has none."""
    if isinstance(completion, str):
        return completion.strip()
    return text_of(completion[-1]).strip() if completion else ""


def evaluate(
    collector: Collector,
    prompts: Prompts,
    temperature: float,
    answer: Answer = stripped_text,
) -> dict[str, float]:
    """Sample completions of every prompt and score them.

    There are `num_generations_eval` per prompt, all on one process, or one at temperature 0.

    Args:
        answer: extracts the answer of a completion, for the majority vote.

    Returns:
        Metrics over all processes, named as in training, of the scores that `Shaping` describes.
        With several completions per prompt also pass@k and majority@n.
    """
    runtime, shaping, args = collector.runtime, collector.shaping, collector.args
    n = args.num_generations_eval if temperature > 0 else 1
    rows, groups, lengths, attempts, parts = [], [], [], [], []
    # Every process goes through the same batches, even with an empty share: no rank deadlocks.
    at_once = max(1, args.prompts_per_step * args.num_generations // n)
    for batch in batches(range(len(prompts)), at_once):
        mine = list(batch[runtime.rank :: runtime.world])
        # Negative indices: noise that training never uses.
        indices = [-1 - row for row in mine]
        samples = collector.sample(prompts, mine, indices, n, temperature)
        scores = collector.score(samples)
        shaped = shaping(scores, samples.rollout, normalize=False)
        rows.append(torch.cat([sum_step_scores(scores), sum_step_scores(shaped)], dim=1))
        groups.append(samples.rollout.groups)
        lengths.append(samples.rollout.lengths())
        parts.append(samples)
        if n > 1:
            paid = _paid(collector.rewards, sum_step_scores(scores)).view(len(mine), n)
            attempts.append(_judged(paid, samples.completions, args.eval_success_threshold, answer))
    everyone, _ = runtime.gather(torch.cat(rows))
    raw, trained = everyone.chunk(2, dim=1)
    owners, _ = runtime.gather(torch.cat(groups))
    metrics = reward_metrics(raw, trained, shaping.names, owners)
    metrics |= length_metrics(runtime.gather(torch.cat(lengths))[0])
    metrics.pop("tokens")
    if n > 1:
        metrics |= _attempt_metrics(runtime.gather(torch.cat(attempts))[0], n)
    return metrics | collector.episode_metrics(parts)


def _paid(rewards: Rewards, raw: Tensor) -> Tensor:
    """Sum the weighted rewards of the functions, (B,) float64, from totals (B,K) of all sources.

    Penalties, clipping and scaling are left out.
    """
    weights = rewards.weights.to(raw.device)
    return (raw[:, : len(weights)] * weights).nansum(dim=1)


def _judged(paid: Tensor, completions: Sequence[Any], threshold: float, answer: Answer) -> Tensor:
    """Return (P,2) float64: the right completions of each prompt, and the majority's reward.

    Args:
        paid: (P,n).
        completions: P n of them, in the order prompt * n + sample.
    """
    n = paid.shape[1]
    # Scores are rounded to float32: a sum that should reach the threshold may fall just short.
    right = (paid > threshold - 1e-6).sum(dim=1)
    with foreign("answer"):
        answers = [_counted(answer(completion), answer) for completion in completions]
    votes = [majority_score(answers[i * n : (i + 1) * n], p) for i, p in enumerate(paid.tolist())]
    return torch.stack([right.to(paid), paid.new_tensor(votes)], dim=1)


def _counted(given: Hashable, answer: Answer) -> Hashable:
    if not isinstance(given, Hashable):
        raise ValueError(
            f"{getattr(answer, '__name__', answer)} must return answers that can be counted, such "
            f"as strings or numbers, got {shown(given)}"
        )
    return given


def _attempt_metrics(judged: Tensor, n: int) -> dict[str, float]:
    """Compute pass@1, 2, 4 ... n and majority@n: means over the rows of `_judged`."""
    right, majority = judged.unbind(dim=1)
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n]
    metrics = {f"pass@{k}": pass_at_k(right, n, k).mean().item() for k in (*sizes, n)}
    return metrics | {f"majority@{n}": majority.mean().item()}
