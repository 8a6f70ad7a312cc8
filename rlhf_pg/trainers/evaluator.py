"""Evaluation: sample and score completions of held-out prompts."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.data.chat import last_text
from rlhf_pg.data.prompts import Prompts
from rlhf_pg.report.metrics import length_metrics, reward_metrics
from rlhf_pg.report.pass_at_k import majority_score, pass_at_k
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.trainers.sampler import Sampler, merge_logged

Answer = Callable[[Any], Hashable]


def stripped_text(completion: Any) -> str:
    """Return the stripped text of a completion, or of its last message; "" if it has none."""
    return last_text(completion).strip()


def evaluate(
    sampler: Sampler, prompts: Prompts, temperature: float, answer: Answer = stripped_text
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
    rows = []
    groups = []
    lengths = []
    attempts = []
    parts = []
    sampler.results = []
    # Every process goes through the same batches, even with an empty share, to avoid deadlocks.
    at_once = max(1, args.prompts_per_step * args.num_generations // n)
    for start in range(0, len(prompts), at_once):
        mine = list(range(len(prompts))[start : start + at_once][runtime.rank :: runtime.world])
        # Negative indices: noise that training never uses.
        indices = [-1 - row for row in mine]
        sampled = sampler.sample(prompts, mine, indices, n, temperature)
        scored = sampler.add_rewards(sampled)
        raw = scored.scores
        shaped = shaping(scored.scores, scored, normalize=False)
        rows.append(torch.cat([sum_step_scores(raw), sum_step_scores(shaped)], dim=1))
        groups.append(scored.groups)
        lengths.append(scored.lengths())
        parts.append(scored)
        if n > 1:
            # Without penalties, clipping and scaling; rows whose rewards failed are masked.
            weights = sampler.rewards.weights.to(raw.device)
            each = sum_step_scores(raw)[:, : len(weights)]
            each = torch.cat([(each * weights).nansum(dim=1, keepdim=True), each], dim=1)
            failed = ~sampled.action_mask.any(1)
            lost = ~failed & ~scored.action_mask.any(1)
            each[lost] = math.nan
            each[failed] = -math.inf
            each = each.view(len(mine), n, each.shape[1])
            votes = each.new_tensor(_votes(each[:, :, 0], scored.completions, answer))
            attempts.append(torch.cat([each, votes.view(-1, 1, 1).expand(-1, n, 1)], dim=2))
    everyone, _ = runtime.gather(torch.cat(rows))
    raw, trained = everyone.chunk(2, dim=1)
    owners, _ = runtime.gather(torch.cat(groups))
    metrics = reward_metrics(raw, trained, shaping.names, owners)
    metrics["reward_stderr"] = standard_error(trained.cpu(), owners.cpu())
    metrics |= length_metrics(runtime.gather(torch.cat(lengths))[0])
    metrics.pop("tokens")
    if n > 1:
        judged = runtime.gather(torch.cat(attempts))[0].cpu()
        names = sampler.rewards.names
        metrics |= attempt_metrics(judged, names, args.eval_success_threshold)
    own, logged = sampler.settle()
    return merge_logged(metrics | own | sampler.episode_metrics(parts), logged)


def standard_error(values: Tensor, owners: Tensor) -> float:
    """Compute the standard error of a mean, or of the sum of the sources' means, clustered by
    prompt (Miller 2024, Eq. 4).

        SE = sqrt(P / (P - 1) * sum_p (sum_{i of p} sum_k (v_ik - mean_k) / N_k)^2)

    Prompts are the draws: the completions of one prompt resemble each other, and N of them say less
    than N prompts would. With equally many per prompt and one source this is the standard deviation
    (ddof 1) of the prompts' means over sqrt(P). The factor P / (P - 1) makes it unbiased for few
    prompts. Of a source that applies to some prompts only, this is the error to first order.

    `values` (N,) or (N,K) have one per completion and source; NaN is left out, so that a source has
    N_k values. `owners` (N,) are their prompts; with fewer than two the error is NaN.
    """
    values = (values if values.dim() == 2 else values[:, None]).double()
    valid = ~values.isnan()
    shares = torch.where(valid, (values - values.nanmean(0)) / valid.sum(0), 0.0).sum(1)
    names, places = torch.unique(owners[valid.any(1)], return_inverse=True)
    if len(names) < 2:
        return math.nan
    sums = shares.new_zeros(len(names)).index_add(0, places, shares[valid.any(1)])
    return (sums.square().sum() * len(names) / (len(names) - 1)).sqrt().item()


def _votes(paid: Tensor, completions: Sequence[Any], answer: Answer) -> list[float]:
    """Return the score of each prompt's most frequent answer, from (P,n) scores of completions, of
    which failed episodes (-inf) have no vote; NaN without a vote.
    """
    n = paid.shape[1]
    with foreign("answer"):
        answers = [answer(completion) for completion in completions]
    for given in answers:
        if not isinstance(given, Hashable):
            raise ValueError(
                f"{getattr(answer, '__name__', answer)} must return hashable answers, such as "
                f"strings or numbers, got {show(given)}"
            )
    votes = []
    for i, scores in enumerate(paid.tolist()):
        pairs = zip(answers[i * n : (i + 1) * n], scores, strict=True)
        valid = [(vote, score) for vote, score in pairs if score > -math.inf]
        if valid:
            votes.append(majority_score(*zip(*valid, strict=True)))
        else:
            votes.append(math.nan)
    return votes


def attempt_metrics(judged: Tensor, names: Sequence[str], threshold: float) -> dict[str, float]:
    """Compute pass@1, 2, 4 ... n, best@n and majority@n: means over prompts, and errors.

    A prompt with a completion that has no score, NaN, is left out. An episode that failed, -inf, is
    wrong at every threshold; best@n and majority@n are over the others of its prompt. `judged`
    (P,n,K+2) has the weighted sum, the scores of the K sources, and the majority's; pass@k of each
    source is computed only if there are several.
    """
    n = judged.shape[1]
    of_prompts = dict[str, Tensor]()
    sizes = [2**i for i in range(n.bit_length()) if 2**i < n]
    heads = ["", *(f"rewards/{name}/" for name in names if len(names) > 1)]
    for head, scores in zip(heads, judged.unbind(2), strict=False):
        scores = scores[~scores.isnan().any(dim=1)]
        # Scores are rounded to float32: a sum that should reach the threshold may fall just short.
        right = (scores > threshold - 1e-6).sum(dim=1)
        of_prompts |= {f"{head}pass@{k}": pass_at_k(right, n, k) for k in (*sizes, n)}
    judged = judged[~judged[:, :, 0].isnan().any(dim=1)]
    judged = judged[judged[:, :, 0].amax(dim=1) > -math.inf]
    highest = judged[:, :, 0].amax(dim=1)
    votes = judged[:, 0, -1]
    of_prompts |= {f"best@{n}": highest, f"majority@{n}": votes}
    metrics = {name: values.mean().item() for name, values in of_prompts.items()}
    errors = {k: standard_error(v, torch.arange(len(v))) for k, v in of_prompts.items()}
    metrics |= {f"{name}_stderr": error for name, error in errors.items()}
    return metrics | {"highest_score": max(highest.tolist(), default=math.nan)}
