"""The language model head: log-probabilities and entropies of tokens without the logits.

Logits are the largest tensor of training, N positions times V tokens. Here they live one chunk at a
time and are turned into their own gradient in place. Where there are several chunks, each is
computed again in the backward pass instead of being kept.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from rlhf_pg.models.logit_transform import NOTHING, LogitTransform, output_layer
from rlhf_pg.models.softmax import TokenDistribution, token_scores

# Logits that live at a time. Forward and backward of 2048 tokens with a vocabulary of 32,768 and
# width 256 took, on one CPU core, 2.4 s with all logits kept, 2.7 s in chunks of this size or half
# of it, which computes them twice, and 4.9 s with plain log_softmax.
CHUNK_SIZE = 2**24
# Bytes of GPU memory for each logit that lives, 2^29 in 80 GiB: a logit takes up to 14 bytes,
# forward or backward, so a chunk is a tenth of the memory at most.
MEMORY_PER_LOGIT = 160


@dataclass(frozen=True)
class ChunkedLMHead:
    """The head of `model` and what follows it, as one function of hidden states.

    It is no module: it owns nothing and calls the model's own layer, so adapters, tied weights and
    the hooks that gather sharded weights keep working. A plain linear layer is called once and
    computes the scores of all chunks meanwhile; any other layer is called for the logits of each
    chunk.
    """

    model: PreTrainedModel  # with an adapter or without; `logit_transform_of` has an answer for it
    temperature: float  # divides every logit
    entropy_gradient: bool  # whether the entropy is part of the loss; otherwise it is detached
    # The same in every process whatever its rows, since each call of the layer may be a collective.
    # With one chunk, the logits are kept for the backward pass.
    chunks: int
    transform: LogitTransform = NOTHING  # of this model

    def __call__(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of tokens (N,) after hidden (N,H), and the entropy of each distribution.

        Both are (N,), in at least float32.
        """
        layer = output_layer(self.model)
        assert layer is not None
        linear: Any = _plain(layer)
        if linear is not None and self.chunks > 1:
            # A call of the layer computes something else, between the same hooks.
            linear.forward = partial(self._scores, linear, tokens)
            try:
                scores: tuple[Tensor, Tensor] = layer(hidden)
            finally:
                del linear.forward
            return scores
        split = (x.tensor_split(self.chunks) for x in (hidden, tokens))
        chunks = [self._chunk(layer, *chunk) for chunk in zip(*split, strict=True)]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _scores(self, layer: nn.Linear, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        distribution = TokenDistribution(self.temperature, self.transform, self.entropy_gradient)
        scores: Any = _ChunkedScores.apply
        both: tuple[Tensor, Tensor] = scores(
            hidden, layer.weight, layer.bias, tokens, distribution, self.chunks
        )
        return both

    def _chunk(self, layer: nn.Module, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # A linear layer keeps its input for the backward pass but not its output, so only the
        # output needs recomputing. With dropout the output would be another one.
        drops = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in layer.modules())
        again = partial(layer, hidden.detach()) if self.chunks > 1 and not drops else None
        return token_scores(
            layer(hidden), tokens, self.temperature, self.entropy_gradient, self.transform, again
        )


class _ChunkedScores(torch.autograd.Function):
    """Scores of a linear layer's output, of which one chunk lives at a time, forward and backward.

    The gradient of the weights is summed over the chunks in at least float32 and rounded once.
    Rounded to bfloat16 at each of hundreds of chunks, it would be wrong by some percent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        distribution: TokenDistribution,
        chunks: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(tokens), dtype=_wide(hidden))
        entropies = torch.empty_like(logprobs)
        for rows in _split(len(tokens), chunks):
            logprobs[rows], entropies[rows] = distribution.scores(
                nn.functional.linear(hidden[rows], weight, bias), tokens[rows]
            )
        ctx.save_for_backward(hidden, weight, bias, tokens, entropies)
        ctx.distribution, ctx.chunks = distribution, chunks
        if not distribution.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *to_scores: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, *numbers = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight, to_bias = (
            torch.zeros_like(x, dtype=_wide(x)) if needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        # From the last chunk to the first, in autograd's order.
        for rows in reversed(_split(len(hidden), ctx.chunks)):
            gradient = nn.functional.linear(hidden[rows], weight, bias)
            ctx.distribution.to_gradient(gradient, *(x[rows] for x in (*numbers, *to_scores)))
            to_hidden[rows] = gradient @ weight
            if to_weight is not None:
                to_weight += _product(gradient.T, hidden[rows])
            if to_bias is not None:
                to_bias += gradient.sum(0, dtype=to_bias.dtype)
            del gradient  # before the next one is made
        rounded = (None if x is None else x.to(weight.dtype) for x in (to_weight, to_bias))
        return to_hidden, *rounded, None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices, summing and returning in at least float32."""
    wide = _wide(a)
    # Tensor cores sum in float32 anyway; ROCm's do not return these sums.
    if a.is_cuda and a.dtype != wide and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _split(count: int, chunks: int) -> list[slice]:
    """Return the rows of each chunk that has any, split as by `tensor_split`."""
    least, more = divmod(count, chunks)
    bounds = [chunk * least + min(chunk, more) for chunk in range(chunks + 1)]
    return [slice(start, end) for start, end in pairwise(bounds) if start < end]


def _plain(layer: nn.Module) -> nn.Linear | None:
    """Return the linear layer that `layer` is or wraps, if nothing is added to its output.

    Additions are an adapter, quantised weights, or a hook that expects logits.
    """
    weights = list(layer.parameters())  # access by name would make ZeRO-3 gather them
    has_hooks = bool(layer._forward_hooks or layer._backward_hooks)
    if has_hooks and not hasattr(weights[0], "ds_id"):  # ZeRO-3's hooks take any output
        return None
    if isinstance(layer, ModulesToSaveWrapper):  # trained whole beside an adapter
        trains = layer.active_adapters and not layer.disable_adapters
        own = layer.modules_to_save[layer.active_adapters[0]] if trains else layer.original_module
        return _plain(own)
    is_linear = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    if is_linear and all(type(p) in (nn.Parameter, FakeTensor) for p in weights):
        return cast("nn.Linear", layer)
    return None


def chunk_size_for(memory: int | None) -> int:
    """Return how many logits may live at a time, given bytes of GPU memory, or None on a CPU."""
    return CHUNK_SIZE if memory is None else max(CHUNK_SIZE, memory // MEMORY_PER_LOGIT)


def num_chunks(tokens: int, vocabulary: int, chunk: int = CHUNK_SIZE) -> int:
    """Return how many chunks keep the logits of a full micro-batch within `chunk` numbers each."""
    return max(1, min(tokens, -(-tokens * vocabulary // chunk)))
