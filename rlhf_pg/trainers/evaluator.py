"""Evaluation: sample and score completions of held-out prompts."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.data.batch import Batch
from rlhf_pg.data.chat import last_text
from rlhf_pg.data.prompts import Prompts
from rlhf_pg.report.metrics import length_metrics, reward_metrics
from rlhf_pg.report.pass_at_k import majority_score, pass_at_k
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers.sampler import Sampler, merge

AnswerFunction = Callable[[Any], Hashable]


def stripped_text(completion: Any) -> str:
    """Return the stripped text of a completion, or of its last message; "" if it has none."""
    return last_text(completion).strip()


def evaluate_set(
    sampler: Sampler,
    prompts: Prompts,
    temperature: float,
    answer: AnswerFunction = stripped_text,
) -> dict[str, float]:
    """Sample completions of every prompt and score them.

    A prompt has `num_generations_eval` completions, all on one process, or one at temperature 0.
    `answer` extracts the answer of a completion, for the majority vote.

    Returns:
        Metrics over all processes, named as in training, of the scores that `Shaping` describes.
        With several completions per prompt also those of `attempt_metrics`; `*_stderr` are standard
        errors over prompts.
    """
    runtime = sampler.runtime
    shaping = sampler.shaping
    args = sampler.args
    n = args.num_generations_eval if temperature > 0 else 1
    scores = []
    attempts = []
    parts = []
    sampler.results = []
    # Every process goes through the same batches, even with an empty share, to avoid deadlocks.
    at_once = max(1, args.prompts_per_step * args.num_generations // n)
    for start in range(0, len(prompts), at_once):
        rows = list(range(len(prompts))[start : start + at_once][runtime.rank :: runtime.world])
        # Negative indices: noise that training never uses.
        indices = [-1 - row for row in rows]
        sampled = sampler.sample(prompts, rows, indices, n, temperature)
        scored = sampler.add_rewards(sampled)
        shaped = shaping.shape(scored.scores, scored, normalize=False)
        both = sum_step_scores(scored.scores), sum_step_scores(shaped)
        scores.append(torch.cat(both, dim=1))
        parts.append(scored)
        if n > 1:
            attempts.append(
                _attempts(
                    sampled,
                    scored,
                    sampler.rewards.weights,
                    n,
                    answer,
                )
            )
    raw, trained = runtime.gather(torch.cat(scores))[0].chunk(2, dim=1)
    owners, _ = runtime.gather(torch.cat([part.groups for part in parts]))
    metrics = reward_metrics(raw, trained, shaping.names, owners)
    metrics["reward_stderr"] = standard_error(trained.cpu(), owners.cpu())
    lengths, _ = runtime.gather(torch.cat([part.lengths() for part in parts]))
    metrics |= length_metrics(lengths)
    if n > 1:
        judged = runtime.gather(torch.cat(attempts))[0].cpu()
        metrics |= attempt_metrics(
            judged,
            sampler.rewards.names,
            args.eval_success_threshold,
        )
    metrics_of_calls, logged = sampler.call_metrics()
    sampled_rows = [row for part in parts for row in part.rows]
    metrics |= metrics_of_calls | sampler.player.metrics(sampled_rows, runtime)
    return merge(metrics, logged)


def standard_error(values: Tensor, owners: Tensor) -> float:
    """Compute the standard error of a mean, or of the sum of the sources' means, clustered by
    prompt (Miller 2024, Eq. 4).

        SE = sqrt(P / (P - 1) * sum_p (sum_{i of p} sum_k (v_ik - mean_k) / N_k)^2)

    Prompts are the draws: the completions of one prompt resemble each other, and N of them say less
    than N prompts would. With equally many per prompt and one source this is the standard deviation
    (ddof 1) of the prompts' means over sqrt(P). The factor P / (P - 1) makes it unbiased for few
    prompts. For a source that applies to some prompts only, this is a first-order estimate.

    `values` (N,) or (N,K) have one per completion and source; NaN is left out, so that a source has
    N_k values. `owners` (N,) are their prompts; with fewer than two the error is NaN.
    """
    values = (values if values.dim() == 2 else values[:, None]).double()
    valid = ~values.isnan()
    shares = torch.where(valid, (values - values.nanmean(0)) / valid.sum(0), 0.0).sum(1)
    names, inverse = torch.unique(owners[valid.any(1)], return_inverse=True)
    if len(names) < 2:
        return math.nan
    sums = shares.new_zeros(len(names)).index_add(0, inverse, shares[valid.any(1)])
    return (sums.square().sum() * len(names) / (len(names) - 1)).sqrt().item()


def _attempts(
    sampled: Batch,
    scored: Batch,
    weights: Tensor,
    n: int,
    answer: AnswerFunction,
) -> Tensor:
    """Return (P,n,K+2) for `attempt_metrics`: scores without penalties, clipping and scaling."""
    scores = sum_step_scores(scored.scores)[:, : len(weights)]
    total = (scores * weights.to(scores.device)).nansum(dim=1, keepdim=True)
    scores = torch.cat([total, scores], dim=1)
    has_failed = ~sampled.action_mask.any(1)
    # Rows whose rewards failed are masked.
    scores[~has_failed & ~scored.action_mask.any(1)] = math.nan
    scores[has_failed] = -math.inf
    scores = scores.view(-1, n, scores.shape[1])
    votes = _votes(scores[:, :, 0], scored.completions, answer)
    votes = scores.new_tensor(votes).view(-1, 1, 1).expand(-1, n, 1)
    return torch.cat([scores, votes], dim=2)


def _votes(scores: Tensor, completions: Sequence[Any], answer: AnswerFunction) -> Any:
    """Return the score of each prompt's most frequent answer, given the scores (P,n) of
    completions; failed episodes (-inf) do not vote. NaN without a vote.
    """
    answers = []
    for completion in completions:
        with foreign("answer"):
            answers.append(answer(completion))
        if not isinstance(answers[-1], Hashable):
            raise ValueError(
                f"{getattr(answer, '__name__', answer)} must return hashable answers, such as "
                f"strings or numbers, got {show(answers[-1])}"
            )
    votes = []
    for i, of_prompt in enumerate(scores.tolist()):
        valid = []
        for pair in zip(answers[i * len(of_prompt) :], of_prompt, strict=False):
            if pair[1] > -math.inf:
                valid.append(pair)
        votes.append(majority_score(*zip(*valid, strict=True)) if valid else math.nan)
    return votes


def attempt_metrics(judged: Tensor, names: Sequence[str], threshold: float) -> dict[str, float]:
    """Compute pass@1, 2, 4 ... n, best@n and majority@n: means over prompts, and errors.

    Prompts with an unscored completion (NaN) are left out. A failed episode (-inf) is wrong at
    every threshold; best@n and majority@n are over the prompt's other episodes. `judged`
    (P,n,K+2) has the weighted sum, the scores of the K sources, and the majority's; pass@k of each
    source is computed only if there are several.
    """
    n = judged.shape[1]
    of_prompts = {}
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n]
    heads = [""]
    if len(names) > 1:
        heads += [f"rewards/{name}/" for name in names]
    for head, scores in zip(heads, judged.unbind(2), strict=False):
        scores = scores[~scores.isnan().any(dim=1)]
        # Scores are rounded to float32: a sum that should reach the threshold may fall just short.
        correct = (scores > threshold - 1e-6).sum(dim=1)
        for k in (*sizes, n):
            of_prompts[f"{head}pass@{k}"] = pass_at_k(correct, n, k)
    judged = judged[~judged[:, :, 0].isnan().any(dim=1)]
    judged = judged[judged[:, :, 0].amax(dim=1) > -math.inf]
    highest = judged[:, :, 0].amax(dim=1)
    of_prompts[f"best@{n}"] = highest
    of_prompts[f"majority@{n}"] = judged[:, 0, -1]
    metrics = {}
    for name, values in of_prompts.items():
        metrics[name] = values.mean().item()
        metrics[f"{name}_stderr"] = standard_error(values, torch.arange(len(values)))
    metrics["highest_score"] = max(highest.tolist(), default=math.nan)
    return metrics
