"""A decoder's forward pass in few and large operations, for sampling on a CPU.

`transformers` computes every layer by some fifty operations on small tensors. Here queries, keys
and values are one product, and so are gate and up; rotary positions are one complex product; and
the matrices lie in the order in which oneDNN reads them. They are copies of the policy's own,
made for one rollout.

Shapes: N tokens of a pass, H query and K key-value heads, D their width, C of the hidden states, V
ids.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_pg.models import max_positions
from rlhf_pg.models.attention import Layout, configs_of, replaced_attention
from rlhf_pg.rollout.native.decode_attention import KeyValues, Prefill
from rlhf_pg.rollout.native.families import Family, family_of, part
from rlhf_pg.rollout.native.kept import forward

logger = logging.getLogger(__name__)

Norm = Callable[[Tensor], Tensor]
Matrix = tuple[Tensor, Tensor | None]  # weight (rows,C) and bias (rows,)


def lean_decoder(model: PreTrainedModel) -> "LeanDecoder | None":
    """Return the lean decoder of a model on a CPU, or None if it is of no known family."""
    family = family_of(model)
    known = family is not None and model.device.type == "cpu" and model.dtype != torch.float64
    return LeanDecoder(model, family) if known and family is not None else None


def agrees(lean: "LeanDecoder", model: PreTrainedModel) -> bool:
    """Return whether both compute the same logits, up to rounding, for some tokens."""
    count = min(8, max_positions(model) or 8)
    ids = torch.arange(count) * 7 % model.config.vocab_size

    def logits(forward: Callable[..., Tensor]) -> Tensor:
        store = KeyValues(0, count)
        store.reserve(1, count)
        return forward(ids, torch.arange(count), Prefill(store, [0], [count])).double()

    with replaced_attention(configs_of(model)):
        known = logits(partial(forward, model))
    error = (logits(lean) - known).abs().max().item() / max(known.abs().max().item(), 1.0)
    agreed = error <= min(1e3 * torch.finfo(model.dtype).eps, 0.1)
    if not agreed:
        logger.warning(
            "the model is sampled by its own forward pass, which is slower: its logits differ by "
            "%.1e from those of other %s models",
            *(error, model.config.model_type),
        )
    return agreed


class LeanDecoder:
    """The forward pass of a model on a CPU that is of a known family, with its present weights."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        trunk = part(model, family.trunk)
        self.tokens: Any = model.get_input_embeddings()
        self.places = _places(part(trunk, family.places)) if family.places else None
        layers = part(trunk, family.layers)
        self.angles = None
        if family.rotary:
            width = _head_width(part(layers[0], family.attention))
            self.angles = _Angles(part(trunk, family.rotary), width)
        parallel = family.is_parallel(model)
        self.layers = [_Layer(layer, family, parallel, self.angles) for layer in layers]
        self.norm = _norm(part(trunk, family.last_norm), family.norm_offset)
        self.head = _product(_matrix(model.get_output_embeddings()))

    def __call__(
        self, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | int = 0
    ) -> Tensor:
        """Return logits (N,V) of N tokens in a packed row, or of those to `keep` (0: all)."""
        count = len(ids)
        more = (0, _size(count) - count)
        ids, positions = (
            nn.functional.pad(x[None], more, "replicate")[0] for x in (ids, positions)
        )
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places(positions)
        turns = None if self.angles is None else self.angles(positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, turns, partial(_attend, layout, number, count, layer.scale))
        logits = self.head(self.norm(x[keep] if isinstance(keep, Tensor) else x))
        return logits if isinstance(keep, Tensor) else logits[:count]


def _size(count: int) -> int:
    """Return with how many tokens, some of them for nothing, so many are computed.

    oneDNN takes a millisecond and a few hundred KiB to prepare for each size. There are eight of
    them from one power of two to the next.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def _attend(
    layout: Layout, layer: int, count: int, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return (N,H*D), the attention of the first `count` tokens, and 0 for the others."""
    more = query.shape[1] - count
    query, key, value = (x[:, :count] for x in (query, key, value))
    out = layout.attend(layer, query, key, value, scale).flatten(1)
    return nn.functional.pad(out, (0, 0, 0, more))


class _Layer:
    """A layer, y = x + attend(norm(x)) and then y + mlp(norm(y)); both of x if it is parallel."""

    def __init__(
        self, layer: nn.Module, family: Family, parallel: bool, angles: "_Angles | None"
    ) -> None:
        attention, mlp = part(layer, family.attention), part(layer, family.mlp)
        self.parallel, self.scale = parallel, float(attention.scaling)
        self.norm = _norm(part(layer, family.attention_norm), family.norm_offset)
        own = family.mlp_norm
        self.mlp_norm = _norm(part(layer, own), family.norm_offset) if own else None
        self.width = _head_width(attention)
        out = _matrix(part(attention, family.out))
        self.queries = out[0].shape[1] // self.width
        matrices = [_matrix(part(attention, name)) for name in family.qkv]
        together = _parted(*matrices[0], self.width) if family.interleaved else _stacked(matrices)
        self.keys = (together[0].shape[0] // self.width - self.queries) // 2
        order = self._order(together[0], angles)
        self.qkv = _product((together[0][order], _rows(together[1], order)))
        self.out = _product(out)
        self.head_norm = None
        if family.head_norms:
            norms = [part(attention, name) for name in family.head_norms]
            self.head_norm = _head_norm(norms, (self.queries, self.keys), angles)
        self.rise = _product(_stacked([_matrix(part(mlp, name)) for name in family.rise]))
        self.gated = len(family.rise) == 2
        self.activation = part(mlp, family.activation)
        self.down = _product(_matrix(part(mlp, family.down)))

    def _order(self, weight: Tensor, angles: "_Angles | None") -> Tensor:
        """Return the order of the rows of queries, keys and values."""
        order = torch.arange(len(weight)).view(-1, self.width)
        if angles is not None:
            turning = self.queries + self.keys
            order[:turning] = order[:turning, angles.order]
        return order.flatten()

    def __call__(
        self, x: Tensor, turns: Tensor | None, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return (N,C) from the same."""
        normed = self.norm(x)
        attended = self.out(attend(*self.heads(normed, turns)))
        if self.parallel:
            return x + attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        x = x + attended
        assert self.mlp_norm is not None
        return x + self.mlp(self.mlp_norm(x))

    def heads(self, x: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (H,N,D), and key and value (K,N,D)."""
        heads = self.qkv(x).view(len(x), -1, self.width)
        turning, value = heads[:, : -self.keys], heads[:, -self.keys :]
        if self.head_norm is not None:
            turning = self.head_norm(turning)
        if turns is not None:
            turning = _turned(turning, turns)
        query, key = turning[:, : self.queries], turning[:, self.queries :]
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def mlp(self, x: Tensor) -> Tensor:
        risen = self.rise(x)
        if self.gated:
            gate, up = risen.chunk(2, dim=1)
            return self.down(self.activation(gate).mul_(up))
        return self.down(self.activation(risen))


class _Angles:
    """Rotary positions (Su et al. 2021) as complex numbers.

    Dimensions i and i + r/2 of a head, of the r that turn, are real and imaginary part of one
    number. In the `order` of a lean decoder they are neighbours, in queries and keys alike, whose
    products stay what they are.
    """

    def __init__(self, rotary: Any, width: int) -> None:
        self.rotary, self.width = rotary, width
        self.table = self._of(64)
        turning = 2 * self._turning
        pairs = torch.arange(turning).view(2, -1).T.flatten()
        self.order = torch.cat([pairs, torch.arange(turning, width)])

    def __call__(self, positions: Tensor) -> Tensor:
        """Return (N,1,D/2) for positions (N,); dimensions that do not turn have a 1."""
        last = int(positions.max())
        if last >= len(self.table):
            self.table = self._of(2 * last)
        return self.table[positions]

    def _of(self, count: int) -> Tensor:
        cos, sin = self.rotary(torch.zeros(()), torch.arange(count)[None])
        self._turning = cos.shape[-1] // 2
        turns = torch.complex(cos[0, :, : self._turning], sin[0, :, : self._turning])
        still = self.width // 2 - self._turning
        return nn.functional.pad(turns, (0, still), value=1.0)[:, None]


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs of (N,heads,D) by complex numbers (N,1,D/2)."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(2).to(heads.dtype)


def _norm(module: nn.Module, offset: float) -> Norm:
    """Return a LayerNorm, or an RMSNorm with weight + offset, as a function."""
    weight: Any = module.weight
    if isinstance(module, nn.LayerNorm):
        shape, bias, eps = module.normalized_shape, module.bias, module.eps
        return partial(layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=eps)
    known: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    weight = weight + offset if offset else weight
    return partial(rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=known)


def _head_norm(norms: Sequence[nn.Module], heads: Sequence[int], angles: _Angles | None) -> Norm:
    """Return the RMSNorm of each query head and of each key head as one function of (N,H+K,D)."""
    weights: list[Any] = [norm.weight for norm in norms]
    order = slice(None) if angles is None else angles.order
    rows = [w[order].expand(count, -1) for w, count in zip(weights, heads, strict=True)]
    every, eps = torch.cat(rows), float(norms[0].variance_epsilon)  # type: ignore[arg-type]
    return lambda x: rms_norm(x, x.shape[-1:], None, eps) * every


def _places(table: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return learnt positions as a function of (N,)."""
    weight: Any = table.weight
    offset = getattr(table, "offset", 0)  # of OPT
    return lambda positions: weight[positions + offset]


def _product(matrix: Matrix) -> Callable[[Tensor], Tensor]:
    """Return the product with a matrix, packed for oneDNN where it can, plus the bias."""
    weight, bias = matrix
    if not packs(weight.dtype):
        return partial(linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    multiply: Any = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed matrices of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _matrix(layer: Any) -> Matrix:
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    return weight, layer.bias


def _stacked(matrices: Sequence[Matrix]) -> Matrix:
    weights, biases = zip(*matrices, strict=True)
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


def _parted(weight: Tensor, bias: Tensor | None, width: int) -> Matrix:
    """Put rows of query, key and value of each head in turn in the order of `_stacked`."""
    order = torch.arange(len(weight)).view(-1, 3, width).transpose(0, 1).flatten()
    return weight[order], _rows(bias, order)


def _rows(bias: Tensor | None, order: Tensor) -> Tensor | None:
    return None if bias is None else bias[order]


def _head_width(attention: Any) -> int:
    width = getattr(attention, "head_dim", None)
    return int(attention.head_size if width is None else width)  # GPT-NeoX has another name
