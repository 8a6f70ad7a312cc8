"""What an estimator sees of a policy that is a table, over everything that it can say.

The state before the second token is the first token; before the first it is 0. There are two
prompts (P), seven completions (C), and two columns (T).
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_pg.advantages import AdvantageInputs
from tests.advantages.tabular import COMPLETIONS, EOS, MASK

NAN = float("nan")
# (C,T) the tokens and the states before them; what stands beyond the end of a completion is unused.
TOKENS = torch.tensor([[*said, EOS][:2] for said in COMPLETIONS])
STATES = torch.tensor([[0, said[0]] for said in COMPLETIONS])


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = numbers(0, 2, 3, 3).requires_grad_()  # (P, state, token)
TOKEN_PAY = 0.3 * numbers(1, 2, 3, 3)[:, STATES, TOKENS] * MASK  # (P,C,T) like a KL in the reward
SOURCES = numbers(2, 2, 7, 2)  # (P,C,2) of two reward functions; the first leaves prompt 1 alone
SOURCES[1, :, 0] = NAN
SCORES = torch.cat([SOURCES, TOKEN_PAY.sum(2, keepdim=True)], dim=2)  # (P,C,K)
PAID = SCORES.nansum(2)  # (P,C) R
REWARDS = TOKEN_PAY.clone()  # (P,C,T)
REWARDS[:, ~MASK[:, 1], 0] += SOURCES.nansum(2)[:, ~MASK[:, 1]]
REWARDS[:, MASK[:, 1], 1] += SOURCES.nansum(2)[:, MASK[:, 1]]
VALUES = numbers(3, 2, 3)  # (P, state): of a critic that knows nothing
STEPS = numbers(4, 2, 7, 2)  # (P,C,T) every token is a step


def log_probs() -> Tensor:
    """(P,C,T) log p of every token, 0 where there is none."""
    table = LOGITS.log_softmax(2)
    return torch.where(MASK, table[:, STATES, TOKENS], 0.0)


def chances() -> Tensor:
    """(P,C) p of every completion."""
    return log_probs().sum(2).exp().detach()


def gradient(objective: Tensor) -> Tensor:
    return torch.autograd.grad(objective, LOGITS, retain_graph=True)[0].flatten()


def weighted(weights: Tensor) -> Tensor:
    """sum of weights (P,C,T) times grad log p of every token."""
    return gradient((weights * log_probs()).sum())


def true_gradient(prompts: Sequence[int]) -> Tensor:
    """grad J, J = mean over the prompts of E[R]."""
    expected = (log_probs().sum(2).exp() * PAID).sum(1)
    return gradient(expected[list(prompts)].mean())


def exact_values() -> Tensor:
    """(P, state) what is still to be paid from each state, on average."""
    table = LOGITS.softmax(2).detach()
    values = torch.zeros(2, 3, dtype=torch.float64)
    second = REWARDS[:, 1:, 1].view(2, 2, 3)  # after A, after B
    values[:, 1:] = (table[:, 1:] * second).sum(2)
    values[:, 0] = (chances() * PAID).sum(1)
    return values


def signals(
    prompts: Sequence[int], said: Sequence[int], values: Tensor = VALUES
) -> AdvantageInputs:
    """Of one row per prompt, given the number of each row's completion."""
    p, c = torch.tensor(prompts), torch.tensor(said)
    greedy = chances().argmax(1)
    return AdvantageInputs(
        rewards=REWARDS[p, c],
        mask=MASK[c],
        scores=SCORES[p, c],
        groups=p,
        rows=slice(0, len(p)),
        action_tokens=MASK[c].sum(1),
        values=values[p[:, None], STATES[c]],
        greedy_scores=SCORES[p, greedy[p]],
        moving_average=0.7,
    )


def expected_gradient(
    prompts: Sequence[int], advantages_of: Callable[[Sequence[int]], Tensor | Sequence[float]]
) -> Tensor:
    """E[mean over rows of sum_t A_t grad log p_t] over everything that the rows could have said.

    Args:
        advantages_of: the number of each row's completion -> (B,T), or one number per row.
    """
    chance, weights = chances(), torch.zeros(2, 7, 2, dtype=torch.float64)
    for said in itertools.product(range(7), repeat=len(prompts)):
        both = chance[list(prompts), list(said)].prod()
        advantages = torch.as_tensor(advantages_of(said), dtype=torch.float64)
        for row, (p, c) in enumerate(zip(prompts, said, strict=True)):
            weights[p, c] += both * advantages[row] / len(prompts)
    return weighted(weights)
