"""A policy that is a table, so that every expectation is a short sum: three tokens, at most two."""

import torch
from torch import Tensor

EOS, A, B = 0, 1, 2
COMPLETIONS = [(EOS,), (A, EOS), (A, A), (A, B), (B, EOS), (B, A), (B, B)]
STATES = [(), (A,), (B,)]
ROWS, TIMES, TOKENS = zip(
    *((i, t, token) for i, said in enumerate(COMPLETIONS) for t, token in enumerate(said)),
    strict=True,
)
MASK = torch.zeros(len(COMPLETIONS), 2, dtype=torch.bool)
MASK[ROWS, TIMES] = True
SCORES = torch.tensor([0.3, 1.0, -0.7, 0.1, 2.0, -1.5, 0.4], dtype=torch.float64)


def logits(seed: int) -> Tensor:
    """(states, tokens), to differentiate by."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, generator=noise, dtype=torch.float64).requires_grad_()


def log_probs(table: Tensor) -> Tensor:
    """(completions, 2): log p of every token of every completion; NaN after the end."""
    states = [STATES.index(COMPLETIONS[i][:t]) for i, t in zip(ROWS, TIMES, strict=True)]
    out = torch.full(MASK.shape, torch.nan, dtype=table.dtype)
    return out.index_put(
        (torch.tensor(ROWS), torch.tensor(TIMES)), table.log_softmax(-1)[states, TOKENS]
    )


def probabilities(table: Tensor) -> Tensor:
    """(completions,), of the whole completion."""
    return log_probs(table).nansum(dim=1).exp()


def visits(table: Tensor) -> Tensor:
    """(states,): how likely each is to come up."""
    return torch.cat([torch.ones(1), table.softmax(-1)[0, 1:]])


def action_values(table: Tensor) -> Tensor:
    """(states, tokens): the expected score after a token, the rest being said by the policy."""
    later = (table.softmax(-1)[1:] * torch.stack([SCORES[1:4], SCORES[4:7]])).sum(1)
    return torch.stack([torch.cat([SCORES[:1], later]), SCORES[1:4], SCORES[4:7]])


def objective(table: Tensor) -> Tensor:
    """J, the expected score."""
    return (probabilities(table) * SCORES).sum()


def gradient(of: Tensor, table: Tensor) -> Tensor:
    return torch.autograd.grad(of, table)[0]
