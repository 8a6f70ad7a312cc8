"""The head of a language model: log-probabilities and entropies of tokens, without the logits.

Logits are the largest tensor of training, N positions times V tokens. Here they live one piece at a
time, are turned into their own gradient in place, and where there are several pieces each of them
is computed again in the backward pass instead of being kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from rlhf_pg.masking import widen
from rlhf_pg.models.finish import NOTHING, Finish, output_layer

# Logits that live at a time. Measured forward and backward, on one CPU core, of 2048 tokens with a
# vocabulary of 32,768 and width 256: 2.4 s where all logits are kept, 2.7 s in pieces of this size
# or half of it, which computes them twice; plain log_softmax takes 4.9 s.
PIECE = 2**24
# What a CPU core works on at a time stays in its cache: several passes for the price of one.
BLOCK = 2**17
# exp of this is 0 in every dtype, and 0 times this is not NaN, as it is for -inf.
IMPOSSIBLE = -1e4


@dataclass(frozen=True)
class Head:
    """The head of `model` and what comes after it, as one function of hidden states.

    It is no module: it owns nothing, and calls the model's own layer, so that adapters, tied
    weights and the hooks that gather split weights hold.

    Args:
        model: with an adapter or without, one that `finish_of` has an answer for.
        temperature: divides every logit.
        entropy_gradient: the entropy is part of the loss; otherwise it is detached.
        parts: how often the layer is called; as often in every process, whatever the rows there,
            since each call may be a collective. With one, the logits are kept for the backward
            pass.
        finish: of this model.
    """

    model: PreTrainedModel
    temperature: float
    entropy_gradient: bool
    parts: int
    finish: Finish = NOTHING

    def __call__(
        self, hidden: Tensor, tokens: Tensor, support_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,), in at least float32.

        Args:
            hidden: (N,H) last hidden states of the trunk.
            tokens: (N,) what followed.
            support_ids: (N,K) as in `token_scores`.
        """
        layer = output_layer(self.model)
        assert layer is not None
        split = (
            x.tensor_split(self.parts) if x is not None else [None] * self.parts
            for x in (hidden, tokens, support_ids)
        )
        pieces = [self._piece(layer, *piece) for piece in zip(*split, strict=True)]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _piece(
        self, layer: nn.Module, hidden: Tensor, tokens: Tensor, support_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # A linear layer keeps its input for the backward pass and not its output, so that nothing
        # but the output needs to be computed again. With dropout it would be another one.
        again = None
        if self.parts > 1 and not _drops(layer):
            again = partial(layer, hidden.detach())
        return token_scores(
            layer(hidden),
            tokens,
            support_ids,
            self.temperature,
            self.entropy_gradient,
            self.finish,
            again,
        )


def token_scores(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor | None = None,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    finish: Finish = NOTHING,
    again: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(y) and H(p) = -sum_v p_v log p_v for p = softmax(z / temperature), both (N,).

        d log p_y / dz_v = (1[v = y] - p_v) / temperature
        dH / dz_v        = -p_v (log p_v + H) / temperature

    In at least float32, whatever the dtype of the logits; a token of probability 0 adds 0. Where
    there is a support S, p is renormalised on it:

        p_S(y) = p(y) / sum_{v in S} p(v)

    Args:
        logits: (N,V), of which z = finish(logits). The backward pass overwrites them: whoever else
            needs them is given an error by `torch`.
        tokens: (N,), each in its support.
        support_ids: (N,K) the tokens of S, padded with -1; a row without any has them all.
        entropy_gradient: otherwise the entropy is detached.
        again: gives the logits another time; they are not kept for the backward pass then.
    """
    law = _Law(temperature, finish, support_ids)
    scores: Any = _Scores.apply
    logprobs, entropies = scores(logits, tokens, law, entropy_gradient, again)
    return logprobs, entropies


@dataclass(frozen=True)
class _Law:
    """From the output of the head to the distribution that a token was drawn from."""

    temperature: float
    finish: Finish
    support_ids: Tensor | None

    @property
    def slope(self) -> float:
        """The derivative of `logits` without a cap."""
        return self.finish.scale / self.temperature

    def logits(self, output: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """What softmax is taken of, (n,V), perhaps `output[rows]` itself; and what a cap multiplies
        the derivative by.
        """
        z, bend = widen(output[rows]), None
        if self.finish.cap is not None:
            bent = (z * (self.finish.scale / self.finish.cap)).tanh()
            z, bend = bent * (self.finish.cap / self.temperature), 1 - bent**2
        elif self.slope != 1:
            z = z * self.slope
        return z if self.support_ids is None else _within(z, self.support_ids[rows]), bend


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        tokens: Tensor,
        law: _Law,
        entropy_gradient: bool,
        again: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = output.new_empty(len(tokens), dtype=widen(output[:0]).dtype)
        entropies = torch.empty_like(logprobs)
        for rows in _blocks(output):
            everywhere = law.logits(output, rows)[0].log_softmax(-1)
            logprobs[rows] = everywhere.gather(1, tokens[rows, None]).squeeze(1)
            everywhere.clamp_(min=IMPOSSIBLE)
            entropies[rows] = -everywhere.exp().mul_(everywhere).sum(-1)
        ctx.save_for_backward(output if again is None else None, tokens, entropies)
        ctx.law, ctx.entropy_gradient, ctx.again = law, entropy_gradient, again
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor, to_entropies: Tensor) -> tuple[Any, ...]:
        output, tokens, entropies = ctx.saved_tensors
        if ctx.again is not None:
            output = ctx.again()
        to_logprobs = to_logprobs[:, None] * ctx.law.slope
        to_entropies = to_entropies[:, None] * ctx.law.slope
        for rows in _blocks(output):
            z, bend = ctx.law.logits(output, rows)
            if ctx.entropy_gradient:
                everywhere = z.log_softmax(-1).clamp_(min=IMPOSSIBLE)
                p = everywhere.exp()
                surprise = everywhere.add_(entropies[rows, None])
                gradient = p.mul_(surprise.mul_(-to_entropies[rows]).sub_(to_logprobs[rows]))
            else:
                gradient = z.softmax(-1).mul_(-to_logprobs[rows])
            gradient.scatter_add_(1, tokens[rows, None], to_logprobs[rows])
            output[rows] = gradient if bend is None else gradient.mul_(bend)
        return output, None, None, None, None


def _blocks(output: Tensor) -> Iterator[slice]:
    """The rows in blocks that a CPU's caches hold; a GPU is better off with all of them."""
    count, vocabulary = output.shape
    block = max(1, count if output.is_cuda else BLOCK * torch.get_num_threads() // vocabulary)
    # Without data every block takes what the first one takes, and there may be thousands.
    end = min(count, block) if isinstance(output, FakeTensor) else count
    for start in range(0, end, block):
        yield slice(start, start + block)


def _within(logits: Tensor, support_ids: Tensor) -> Tensor:
    """The logits (N,V), -inf beyond the support of their row; one without any keeps them all."""
    given = support_ids >= 0
    vocabulary = logits.shape[-1]
    # Padding is sent to a column of its own, behind the vocabulary.
    columns = torch.where(given, support_ids, vocabulary).long()
    kept = torch.zeros((len(logits), vocabulary + 1), dtype=torch.bool, device=logits.device)
    kept = kept.scatter_(1, columns, True)[:, :-1] | ~given.any(dim=1, keepdim=True)
    return logits.masked_fill(~kept, -torch.inf)


def _drops(layer: nn.Module) -> bool:
    """Whether two calls of the layer give two results."""
    return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in layer.modules())


def parts_for(tokens: int, vocabulary: int) -> int:
    """How many pieces keep the logits of a full micro-batch within `PIECE` numbers each."""
    return max(1, min(tokens, -(-tokens * vocabulary // PIECE)))
