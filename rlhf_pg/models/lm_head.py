"""The language model head: log-probabilities and entropies of tokens without the logits.

Logits are the largest tensor of training, N positions times V tokens. Here only one chunk is in
memory at a time, and is turned into its own gradient in place. With several chunks, each is
recomputed in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rlhf_pg.kl import IMPOSSIBLE
from rlhf_pg.masking import widen
from rlhf_pg.models.attention import runs_on_device, wide_product

# The classes that `from_pretrained` returns: PeftModel is not a PreTrainedModel, but wraps one.
LOADED = (PreTrainedModel, PeftModel)

# Logits in memory at a time. Forward and backward of 2048 tokens with a vocabulary of 32,768 took
# 2.7 s on a CPU core in such chunks, 2.4 s with all logits kept, 4.9 s with plain log_softmax.
CHUNK_SIZE = 2**24
# Bytes of GPU memory per logit in a chunk, 2^29 logits in 80 GiB: a logit takes up to 14 bytes,
# forward or backward, so a chunk takes at most a tenth of the memory.
MEMORY_PER_LOGIT = 160
# Numbers per CPU core in a block: they stay in its cache, so further passes are nearly free.
BLOCK = 2**17


@dataclass(frozen=True)
class LogitTransform:
    """A function that a model applies to the output x of its head: s x, or c tanh(s x / c)."""

    scale: float = 1.0  # s
    cap: float | None = None  # c

    def __call__(self, x: Tensor) -> Tensor:
        """Return the model's logits."""
        scaled = x * self.scale
        if self.cap is None:
            return scaled
        return self.cap * (scaled / self.cap).tanh()


NOTHING = LogitTransform()
TokenStatistics = tuple[Tensor, ...]  # of each token, (N,): see `TokenDistribution.statistics`
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # see `rlhf_pg.kl.divergence`
# From log-probabilities (n,V) of these rows: divergences from a teacher, gradients by logits.
Compare = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
CompareRows = Callable[[Tensor], tuple[Tensor, Tensor]]  # the same, for known rows
HeadInput = tuple["TeacherHead", Tensor]  # the head, and the hidden states (N,H) it reads


@dataclass(frozen=True)
class TokenDistribution:
    """The mapping from the output of the head to the distribution of a token, and its gradient.

    With label smoothing s (Szegedy et al. 2016) over V tokens, the log-probability of a token is

        (1 - s) log p(y) + s/V sum_v log p(v)
    """

    temperature: float
    transform: LogitTransform
    entropy_gradient: bool
    smoothing: float = 0.0

    @property
    def slope(self) -> float:
        """The derivative of `logits` without a cap."""
        return self.transform.scale / self.temperature

    def logits(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the argument of softmax, (n,V), and a cap's factor in the derivative."""
        z = widen(output)
        bend = None
        cap = self.transform.cap
        if cap is not None:
            bent = (z * (self.transform.scale / cap)).tanh()
            z = bent * (cap / self.temperature)
            bend = 1 - bent**2
        elif self.slope != 1:
            z = z * self.slope
        return z, bend

    def statistics(
        self,
        output: Tensor,
        tokens: Tensor,
        compare: Compare | None = None,
    ) -> TokenStatistics:
        """Return log-probabilities, entropies and, if asked, divergences from a teacher; (N,)."""
        compute: Any = _statistics
        if _compiles(output, compare):
            compute = _compiled(_statistics)
        dtype = _wide(output)
        count = 2 + (compare is not None)
        columns = tuple(output.new_empty(len(tokens), dtype=dtype) for _ in range(count))
        for rows in _blocks(output):
            parts = compute(self, output[rows], tokens[rows], _of_rows(compare, rows))
            for column, part in zip(columns, parts, strict=True):
                column[rows] = part
        return columns

    def to_gradient(
        self,
        output: Tensor,
        tokens: Tensor,
        *numbers: Tensor,
        compare: Compare | None = None,
    ) -> None:
        """Overwrite the output with its gradient, given the entropies, and the gradients of
        log-probabilities, entropies and, if there are any, divergences; (N,) each.
        """
        overwrite: Any = _overwrite
        is_compiled = _compiles(output, compare)
        if is_compiled:
            overwrite = _compiled(_overwrite)
        for rows in _blocks(output):
            of_rows = (x[rows] for x in numbers)
            teacher = _of_rows(compare, rows)
            overwrite(self, is_compiled, output[rows], tokens[rows], teacher, *of_rows)


def _of_rows(compare: Compare | None, rows: slice) -> CompareRows | None:
    if compare is None:
        return None
    return lambda logprobs: compare(logprobs, rows)


def _statistics(
    distribution: TokenDistribution,
    output: Tensor,
    tokens: Tensor,
    compare: CompareRows | None,
) -> TokenStatistics:
    """Return the statistics of a block of rows."""
    everywhere = distribution.logits(output)[0].log_softmax(-1)
    logprobs = everywhere.gather(1, tokens[:, None]).squeeze(1)
    if distribution.smoothing:
        logprobs = logprobs.lerp(everywhere.mean(1), distribution.smoothing)
    everywhere.clamp_(min=IMPOSSIBLE)
    divergences = () if compare is None else compare(everywhere)[:1]
    entropies = -everywhere.exp().mul_(everywhere).sum(-1)
    return logprobs, entropies, *divergences


def _overwrite(
    distribution: TokenDistribution,
    is_compiled: bool,
    output: Tensor,
    tokens: Tensor,
    compare: CompareRows | None,
    entropies: Tensor,
    to_logprobs: Tensor,
    to_entropies: Tensor,
    *to_divergences: Tensor,
) -> None:
    """Overwrite a block of rows with its gradient."""
    to_logprobs = to_logprobs[:, None] * distribution.slope
    to_entropies = to_entropies[:, None] * distribution.slope
    z, bend = distribution.logits(output)
    if distribution.entropy_gradient or compare is not None:
        everywhere = z.log_softmax(-1).clamp_(min=IMPOSSIBLE)
    if compare is not None:
        towards = compare(everywhere)[1]
        towards *= to_divergences[0][:, None] * distribution.slope
    if distribution.entropy_gradient:
        p = everywhere.exp()
        surprise = everywhere.add_(entropies[:, None])
        surprise.mul_(-to_entropies).sub_(to_logprobs)
        gradient = p.mul_(surprise)
    else:
        gradient = z.softmax(-1)
        gradient.mul_(-to_logprobs)
    of_token = to_logprobs * (1 - distribution.smoothing)
    if is_compiled:  # a comparison joins the same pass, which a scattered sum would split
        columns = torch.arange(output.shape[1], device=output.device)
        gradient += torch.where(columns == tokens[:, None], of_token, 0.0)
    else:
        gradient.scatter_add_(1, tokens[:, None], of_token)
    if distribution.smoothing:
        gradient += to_logprobs * (distribution.smoothing / gradient.shape[1])
    if compare is not None:
        gradient += towards
    output.copy_(gradient if bend is None else gradient.mul_(bend))


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use: a GPU then passes over the logits twice, and not eight times."""
    return torch.compile(function, dynamic=True)


def _compiles(output: Tensor, compare: Compare | None) -> bool:
    """Return whether the passes over logits are compiled: on a GPU, without a teacher."""
    if not output.is_cuda or compare is not None or isinstance(output, FakeTensor):
        return False
    return _head_compiles(output.dtype, output.device)


@cache
def _head_compiles(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the head compiles on this device; log if not."""

    def act() -> None:
        output = torch.ones(4, 8, dtype=dtype, device=device)
        tokens = torch.zeros(4, dtype=torch.int64, device=device)
        numbers = [torch.ones(4, dtype=_wide(output), device=device)] * 3
        distribution = TokenDistribution(1.0, NOTHING, entropy_gradient=False)
        _compiled(_statistics)(distribution, output, tokens, None)
        _compiled(_overwrite)(distribution, True, output, tokens, None, *numbers)

    return runs_on_device(act, "the head is not compiled, so updates are slower")


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's head, and how a policy's distribution is compared with the teacher's."""

    weight: Tensor  # (V,H)
    bias: Tensor | None
    distribution: TokenDistribution
    divergence: Divergence

    def after(self, hidden: Tensor) -> Compare:
        """Return the comparison with the teacher's distributions after its hidden states (N,H)."""
        output = nn.functional.linear(hidden, self.weight, self.bias)

        def compare(logprobs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            of_teacher = self.distribution.logits(output[rows])[0].log_softmax(-1)
            return self.divergence(logprobs, of_teacher.clamp_(min=IMPOSSIBLE))

        return compare


@dataclass(frozen=True)
class ChunkedLMHead:
    """The head of `model` and the transform after it, as one function of hidden states.

    It has no parameters and calls the model's own layer, so that adapters, tied weights and hooks
    that gather sharded weights keep working. A plain linear layer is called once, for all chunks;
    any other layer is called for the logits of each chunk.
    """

    model: PreTrainedModel  # with an adapter or without; see `logit_transform_of`
    temperature: float  # divides every logit
    entropy_gradient: bool  # whether the entropy is part of the loss; otherwise it is detached
    # The same on all processes, since each call of the layer may be a collective. With one chunk,
    # the logits are kept for the backward pass.
    chunks: int
    transform: LogitTransform = NOTHING  # the model's transform

    def __call__(
        self,
        hidden: Tensor,
        tokens: Tensor,
        teacher: HeadInput | None = None,
        smoothing: float = 0.0,
    ) -> TokenStatistics:
        """Return log p of tokens (N,) after hidden (N,H), and the entropy of each distribution;
        with a teacher also its divergence from the teacher's.

        All are (N,), in at least float32.
        """
        layer = output_layer(self.model)
        assert layer is not None
        distribution = TokenDistribution(
            self.temperature,
            self.transform,
            self.entropy_gradient,
            smoothing,
        )
        linear: Any = plain(layer)
        if linear is not None and self.chunks > 1:
            # The layer's hooks run as usual, but its forward computes statistics.
            linear.forward = lambda x: _ChunkedStatistics.apply(  # type: ignore[no-untyped-call]
                x,
                linear.weight,
                linear.bias,
                tokens,
                distribution,
                self.chunks,
                teacher,
            )
            try:
                statistics: TokenStatistics = layer(hidden)
            finally:
                del linear.forward
            return statistics

        def of_chunk(x: Tensor, y: Tensor, *states: Tensor) -> Any:
            compare = teacher and teacher[0].after(*states)
            return _TokenStatistics.apply(layer(x), y, distribution, compare)  # type: ignore[no-untyped-call]

        if self.chunks > 1:
            of_chunk = partial(checkpoint, of_chunk, use_reentrant=False)
        read = [hidden, tokens]
        if teacher is not None:
            read.append(teacher[1])
        pieces = (x.tensor_split(self.chunks) for x in read)
        parts = map(of_chunk, *pieces)
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    @torch.no_grad()
    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token after each of hidden (N,H), (N,)."""
        layer: Any = output_layer(self.model)
        return torch.cat([layer(part).argmax(-1) for part in hidden.tensor_split(self.chunks)])


class _ChunkedStatistics(torch.autograd.Function):
    """Statistics of a linear layer's output, with one chunk of it in memory, forward and backward.

    The gradient of the weights is summed over the chunks in at least float32 and rounded once.
    Rounding to bfloat16 after each of hundreds of chunks would cause errors of several percent.
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
        teacher: HeadInput | None,
    ) -> TokenStatistics:
        count = 2 + (teacher is not None)
        statistics = tuple(hidden.new_empty(len(tokens), dtype=_wide(hidden)) for _ in range(count))
        for rows in _split(len(tokens), chunks):
            output = nn.functional.linear(hidden[rows], weight, bias)
            compare = teacher and teacher[0].after(teacher[1][rows])
            parts = distribution.statistics(output, tokens[rows], compare)
            for column, part in zip(statistics, parts, strict=True):
                column[rows] = part
            del output, compare, parts  # before the next ones are made
        ctx.save_for_backward(hidden, weight, bias, tokens, statistics[1])
        ctx.distribution = distribution
        ctx.chunks = chunks
        ctx.teacher = teacher
        if not distribution.entropy_gradient:
            ctx.mark_non_differentiable(statistics[1])
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *to_statistics: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, *numbers = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight, to_bias = (
            torch.zeros_like(x, dtype=_wide(x)) if needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        # From the last chunk to the first, in autograd's order.
        for rows in reversed(_split(len(hidden), ctx.chunks)):
            gradient = nn.functional.linear(hidden[rows], weight, bias)
            compare = ctx.teacher and ctx.teacher[0].after(ctx.teacher[1][rows])
            parts = (x[rows] for x in (*numbers, *to_statistics))
            ctx.distribution.to_gradient(gradient, *parts, compare=compare)
            to_hidden[rows] = gradient @ weight
            if to_weight is not None:
                to_weight += wide_product(gradient.T, hidden[rows])
            if to_bias is not None:
                to_bias += gradient.sum(0, dtype=to_bias.dtype)
            del gradient, compare  # before the next ones are made
        rounded = (None if x is None else x.to(weight.dtype) for x in (to_weight, to_bias))
        return to_hidden, *rounded, None, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _split(count: int, chunks: int) -> list[slice]:
    """Return the rows of each non-empty chunk, split as by `tensor_split`."""
    least, larger = divmod(count, chunks)
    bounds = [chunk * least + min(chunk, larger) for chunk in range(chunks + 1)]
    return [slice(start, end) for start, end in pairwise(bounds) if start < end]


def plain(layer: nn.Module) -> nn.Linear | None:
    """Return the linear layer that `layer` is or wraps; None for an adapter, quantised weights, or
    a hook that expects logits.
    """
    weights = list(layer.parameters())  # access by name would make ZeRO-3 gather them
    has_hooks = bool(layer._forward_hooks or layer._backward_hooks)
    if has_hooks and not hasattr(weights[0], "ds_id"):  # ZeRO-3's hooks accept any output
        return None
    if isinstance(layer, ModulesToSaveWrapper):  # trained in full beside an adapter
        if layer.active_adapters and not layer.disable_adapters:
            return plain(layer.modules_to_save[layer.active_adapters[0]])
        return plain(layer.original_module)
    is_linear = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    if is_linear and all(type(p) in (nn.Parameter, FakeTensor) for p in weights):
        return cast("nn.Linear", layer)
    return None


def chunk_size_for(memory: int | None) -> int:
    """Return the largest chunk of logits for these bytes of GPU memory, or None on a CPU."""
    if memory is None:
        return CHUNK_SIZE
    return max(CHUNK_SIZE, memory // MEMORY_PER_LOGIT)


def num_chunks(tokens: int, vocabulary: int, chunk: int = CHUNK_SIZE) -> int:
    """Return the number of chunks of at most `chunk` logits in a full micro-batch."""
    return max(1, min(tokens, -(-tokens * vocabulary // chunk)))


def token_statistics(
    logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    transform: LogitTransform = NOTHING,
    compare: Compare | None = None,
    smoothing: float = 0.0,
) -> TokenStatistics:
    """Return log p(y) and H(p) = -sum_v p_v log p_v for p = softmax(z / temperature), both (N,),
    and p's divergence from a teacher's distribution, if there is one.

        d log p_y / dz_v = (1[v = y] - p_v) / temperature
        dH / dz_v        = -p_v (log p_v + H) / temperature

    All are in at least float32; a token of probability 0 adds 0 to H.

    Args:
        logits: (N,V), with z = transform(logits). The backward pass overwrites them; `torch` raises
            an error if another operation needs them.
        entropy_gradient: whether the entropy has a gradient; otherwise it is detached.
        smoothing: see `TokenDistribution`.
    """
    distribution = TokenDistribution(temperature, transform, entropy_gradient, smoothing)
    statistics: TokenStatistics = _TokenStatistics.apply(logits, tokens, distribution, compare)  # type: ignore[no-untyped-call]
    return statistics


class _TokenStatistics(torch.autograd.Function):
    """Statistics of logits, which are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        tokens: Tensor,
        distribution: TokenDistribution,
        compare: Compare | None,
    ) -> TokenStatistics:
        statistics = distribution.statistics(output, tokens, compare)
        ctx.save_for_backward(output, tokens, statistics[1])
        ctx.distribution = distribution
        ctx.compare = compare
        if not distribution.entropy_gradient:
            ctx.mark_non_differentiable(statistics[1])
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *to_statistics: Tensor) -> tuple[Any, ...]:
        output, tokens, entropies = ctx.saved_tensors
        ctx.distribution.to_gradient(output, tokens, entropies, *to_statistics, compare=ctx.compare)
        return output, None, None, None


class MeasuringMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode of fake tensors that measure the memory of a `kind` of device."""

    kind = "cpu"


def _blocks(output: Tensor) -> Iterator[slice]:
    """Yield the rows in blocks that fit a CPU's caches; a GPU takes all rows at once."""
    count, vocabulary = output.shape
    mode = output.fake_mode if isinstance(output, FakeTensor) else None
    kind = mode.kind if isinstance(mode, MeasuringMode) else output.device.type
    block = count
    if kind != "cuda":
        block = BLOCK * torch.get_num_threads() // vocabulary
    block = max(1, block)
    # Fake tensors only measure memory, for which one of perhaps thousands of blocks is enough.
    end = count if mode is None else min(count, block)
    for start in range(0, end, block):
        yield slice(start, start + block)


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """Return the base model of an adapter, with adapted layers, or the model itself."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def trunk(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head (but with its adapters), from tokens to hidden states."""
    module: nn.Module = bare(model).base_model
    return module


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """Return the head of the model below any adapter; it may itself be adapted."""
    layer: nn.Module | None = bare(model).get_output_embeddings()
    return layer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the block, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Known(BaseModelOutput):  # type: ignore[misc]
    """The output of a trunk that has nothing but hidden states."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def logit_transform_of(model: nn.Module) -> LogitTransform | None:
    """Find the model's transform after its head, by replacing the head's output by known numbers.

    It runs the model, so call it before sharding; on the meta device it runs only the parts outside
    trunk and head. None if `ChunkedLMHead` cannot replace the head: the module is of
    another kind, the head reads something other than the trunk's last hidden states, or another
    operation follows it.
    """
    layer: Any = output_layer(model) if isinstance(model, LOADED) else None
    # A model that does not name its trunk, such as Llama4ForCausalLM, returns itself as trunk.
    if layer is None or layer in trunk(model).modules():
        return None
    body = trunk(model)
    hollow = next(model.parameters()).is_meta
    calls = list[tuple[tuple[Any, ...], Tensor]]()  # what the head read, and what was shown

    def exchange(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        # Numbers that are exact in every dtype, in the linear and the flat range of tanh.
        x = torch.arange(output.numel(), dtype=torch.float64) * 7 % 129 - 64
        x = x.reshape(output.shape)
        x[..., 0] = 2.0**-20
        x[..., 1] = 2.0**100
        calls.append((inputs, x))
        return x

    # Every tensor is made here, also where the caller's default device is "meta".
    device = torch.device("cpu") if hollow else next(model.parameters()).device
    with evaluating(model), device:
        ids = torch.tensor([[0, 1, 2]])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "use_cache": False,
        }
        if hollow:
            hidden = torch.arange(3.0 * layer.weight.shape[1])
            hidden = hidden.reshape(1, 3, -1)
            body.forward = lambda *_, **__: Known(hidden)
            layer.forward = lambda x: x.new_zeros(*x.shape[:-1], len(layer.weight))
        else:
            hidden = body(**inputs).last_hidden_state
        hook = layer.register_forward_hook(exchange)
        try:
            made = model(**inputs).logits
        except RuntimeError:
            if not hollow:
                raise
            return None  # other modules need weights
        finally:
            hook.remove()
            if hollow:
                del body.forward, layer.forward
    if len(calls) != 1:
        return None
    [(read, x)] = calls
    if not read or read[0].is_meta or not torch.equal(read[0], hidden):
        return None
    made = made.double()
    if made.shape != x.shape:
        return None
    scale = float(made[0, 0, 0] / x[0, 0, 0])
    limit = float(made[0, 0, 1])
    cap = limit if abs(limit) < 2.0**50 else None
    transform = LogitTransform(scale, cap)
    if torch.allclose(transform(x), made, rtol=1e-6, atol=0):
        return transform
    return None
