"""Metrics of several attempts at one prompt: pass@k and the majority vote.

Plain numbers on the CPU; P prompts, n attempts at each.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def pass_at_k(right: Tensor, n: int, k: int) -> Tensor:
    """Compute the chance that one of k attempts is right (Chen et al. 2021, Eq. 1), without bias.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j=0}^{k-1} (n - c - j) / (n - j)

    c of the n attempts are right; the quotient is the share of their subsets of size k in which
    none is. The product has no large numbers; one of its factors is 0 where fewer than k are wrong.

    Args:
        right: (P,) c of every prompt.
        n: attempts at each, at least k.

    Returns:
        (P,) float64.

    Elsewhere: 1 - (1 - c/n)^k is too low for every k above 1, since it may draw an attempt twice.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the {n} attempts, got {k}")
    drawn = torch.arange(k, dtype=torch.float64)
    wrong = n - right.cpu().double()[:, None]
    return 1 - ((wrong - drawn) / (n - drawn)).prod(dim=1)


def majority_score(answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Compute the score of one prompt's most frequent answer (self-consistency; Wang et al. 2022).

    An answer's score is the mean of the attempts that gave it, which may have been scored for more
    than the answer. Answers that are equally frequent share the vote: the mean over them, which
    does not depend on the order of the attempts.

    Args:
        answers: n answers, one per attempt.
        scores: n scores of the attempts.
    """
    votes = Counter(answers)
    most = max(votes.values())
    winning = [s for answer, s in zip(answers, scores, strict=True) if votes[answer] == most]
    return sum(winning) / len(winning)
