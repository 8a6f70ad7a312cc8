"""Log-probabilities and entropies from the output of a head, and their gradient."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from rlhf_pg.masking import widen
from rlhf_pg.models.logit_transform import NOTHING, LogitTransform

# Numbers per CPU core in one block: they stay in its cache, so further passes are nearly free.
BLOCK = 2**17
# exp of this is 0 in every dtype, and 0 times this is not NaN, as it is for -inf.
IMPOSSIBLE = -1e4


def token_scores(
    logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    transform: LogitTransform = NOTHING,
    again: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(y) and H(p) = -sum_v p_v log p_v for p = softmax(z / temperature), both (N,).

        d log p_y / dz_v = (1[v = y] - p_v) / temperature
        dH / dz_v        = -p_v (log p_v + H) / temperature

    Both are in at least float32, whatever the dtype of the logits; a token of probability 0 adds 0.

    Args:
        logits: (N,V), with z = transform(logits). The backward pass overwrites them; `torch` raises
            an error if anything else needs them.
        entropy_gradient: whether the entropy has a gradient; otherwise it is detached.
        again: recomputes the logits, which are then not kept for the backward pass.
    """
    distribution = TokenDistribution(temperature, transform, entropy_gradient)
    scores: Any = _Scores.apply
    logprobs, entropies = scores(logits, tokens, distribution, again)
    return logprobs, entropies


@dataclass(frozen=True)
class TokenDistribution:
    """The mapping from the output of the head to the distribution of a token, and its gradient."""

    temperature: float
    transform: LogitTransform
    entropy_gradient: bool

    @property
    def slope(self) -> float:
        """The derivative of `logits` without a cap."""
        return self.transform.scale / self.temperature

    def logits(self, output: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the argument of softmax, (n,V), and a cap's factor in the derivative."""
        z, bend = widen(output[rows]), None
        if self.transform.cap is not None:
            bent = (z * (self.transform.scale / self.transform.cap)).tanh()
            z, bend = bent * (self.transform.cap / self.temperature), 1 - bent**2
        elif self.slope != 1:
            z = z * self.slope
        return z, bend

    def scores(self, output: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, (N,)."""
        logprobs = output.new_empty(len(tokens), dtype=widen(output[:0]).dtype)
        entropies = torch.empty_like(logprobs)
        for rows in _blocks(output):
            everywhere = self.logits(output, rows)[0].log_softmax(-1)
            logprobs[rows] = everywhere.gather(1, tokens[rows, None]).squeeze(1)
            everywhere.clamp_(min=IMPOSSIBLE)
            entropies[rows] = -everywhere.exp().mul_(everywhere).sum(-1)
        return logprobs, entropies

    def to_gradient(
        self,
        output: Tensor,
        tokens: Tensor,
        entropies: Tensor,
        to_logprobs: Tensor,
        to_entropies: Tensor,
    ) -> None:
        """Overwrite the output with its gradient, given the gradients of the scores."""
        to_logprobs = to_logprobs[:, None] * self.slope
        to_entropies = to_entropies[:, None] * self.slope
        for rows in _blocks(output):
            z, bend = self.logits(output, rows)
            if self.entropy_gradient:
                everywhere = z.log_softmax(-1).clamp_(min=IMPOSSIBLE)
                p = everywhere.exp()
                surprise = everywhere.add_(entropies[rows, None])
                gradient = p.mul_(surprise.mul_(-to_entropies[rows]).sub_(to_logprobs[rows]))
            else:
                gradient = z.softmax(-1).mul_(-to_logprobs[rows])
            gradient.scatter_add_(1, tokens[rows, None], to_logprobs[rows])
            output[rows] = gradient if bend is None else gradient.mul_(bend)


class _Scores(torch.autograd.Function):
    """Scores of logits that are kept for the backward pass, or recomputed by `again`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        tokens: Tensor,
        distribution: TokenDistribution,
        again: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = distribution.scores(output, tokens)
        ctx.save_for_backward(output if again is None else None, tokens, entropies)
        ctx.distribution, ctx.again = distribution, again
        if not distribution.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor, to_entropies: Tensor) -> tuple[Any, ...]:
        output, tokens, entropies = ctx.saved_tensors
        if ctx.again is not None:
            output = ctx.again()
        ctx.distribution.to_gradient(output, tokens, entropies, to_logprobs, to_entropies)
        return output, None, None, None


def _blocks(output: Tensor) -> Iterator[slice]:
    """Yield the rows in blocks that fit a CPU's caches; a GPU takes all rows at once."""
    count, vocabulary = output.shape
    block = max(1, count if output.is_cuda else BLOCK * torch.get_num_threads() // vocabulary)
    # Fake tensors only measure memory: one block tells for all, and there may be thousands.
    end = min(count, block) if isinstance(output, FakeTensor) else count
    for start in range(0, end, block):
        yield slice(start, start + block)
