"""The attention kernels of GPUs that CPUs lack: FlashAttention for sequences of any length.

One kernel each, in float32, and as strict as CUDA's about dtypes and shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
_libraries: list[torch.library.Library] = []  # gone when nobody has them


def install(key: str = "CUDA", dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Make them the kernels of a dispatch key.

    Args:
        dtypes: more that they take, for tests on a CPU.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("forward", _forward), ("backward", _backward)):
        library.impl(f"_flash_attention_{name}", partial(kernel, (*DTYPES, *dtypes)), key)
    _libraries.append(library)


def _launch(name: str, run: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
    """Run it on tensors of the host: on the device as one kernel, which a graph runs again."""
    if not tensors[0].is_cuda:
        return run(tensors)
    from tests.device.pretend.extension import ext

    ext.kernel(f"aten::_flash_attention_{name}", run, tensors)
    return None


def _check(taken: Sequence[torch.dtype], heads: Sequence[Tensor], ends: Sequence[Any]) -> None:
    """As `mha_varlen_fwd` of torch does (aten/src/ATen/native/transformers/cuda/flash_attn)."""
    query, key = heads[:2]
    for x in heads:
        if x.dtype not in taken:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if x.dtype != query.dtype:
            raise RuntimeError("query, key and value must have the same dtype")
        if x.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if x.dim() != 3 or x.shape[2] != query.shape[2] or x.device != query.device:
            raise RuntimeError(f"a tensor of shape {tuple(x.shape)} on {x.device}")
    if query.shape[2] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if query.shape[2] % 8:
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for x in ends:
        if x.dtype != torch.int32 or not x.is_contiguous() or x.device != query.device:
            raise RuntimeError("lengths must have dtype int32 and be contiguous, on the device")
    if len({len(x) for x in ends[:2]}) > 1 or any(len(x) + 1 != len(ends[0]) for x in ends[2:]):
        raise RuntimeError("as many sequences of keys as of queries")


def _sequences(
    query_ends: Tensor, key_ends: Tensor, used: Tensor | None, most: tuple[int, int]
) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence; nothing is computed beyond the promised longest."""
    starts, keys = query_ends.tolist(), key_ends.tolist()
    lengths = used.tolist() if used is not None else [b - a for a, b in pairwise(keys)]
    for i, length in enumerate(lengths):
        rows = min(starts[i + 1] - starts[i], most[0])
        yield slice(starts[i], starts[i] + rows), slice(keys[i], keys[i] + min(length, most[1]))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """(H,L,S) of queries (L,H,D) on keys (S,K,D), whose ends meet where it is causal."""
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = scale * query.float().transpose(0, 1) @ key.permute(1, 2, 0)
    if not causal:
        return scores
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
    return scores.masked_fill(~seen, -torch.inf)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(L,K,D) to (H,L,D) in float32: a key head once for every query head."""
    return x.float().repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The way back, (H,L,D) to (L,K,D), where copies of a key head are added up."""
    return x.view(heads, -1, *x.shape[1:]).sum(1).transpose(0, 1)


def _forward(
    taken: Sequence[torch.dtype],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    used = [] if seqused_k is None else [seqused_k]
    _check(taken, [query, key, value], [cum_seq_q, cum_seq_k, *used])
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logsum = torch.empty(query.shape[1], query.shape[0], device=query.device)
    longest = (max_q, max_k)
    tensors = [query, key, value, out, logsum, cum_seq_q, cum_seq_k, *used]

    def run(hosts: list[Tensor]) -> None:
        q, k, v, to, to_logsum, starts, ends, *rest = hosts
        for rows, seen in _sequences(starts, ends, rest[0] if rest else None, longest):
            scores = _scores(q[rows], k[seen], is_causal, scale)
            to_logsum[:, rows] = logsum = scores.logsumexp(-1)
            weights = (scores - logsum[..., None]).exp().nan_to_num(0.0)  # 0 where nothing is seen
            to[rows] = (weights @ _by_head(v[seen], q.shape[1])).transpose(0, 1).to(to.dtype)

    _launch("forward", run, tensors)
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return out, logsum, nothing, nothing, torch.empty(0, dtype=query.dtype, device=query.device)


def _backward(
    taken: Sequence[torch.dtype],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(taken, [query, key, value, grad_out], [cum_seq_q, cum_seq_k])
    scale = query.shape[2] ** -0.5 if scale is None else scale
    grads = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    given = [query, key, value, out, grad_out, logsumexp, cum_seq_q, cum_seq_k]

    def run(hosts: list[Tensor]) -> None:
        q, k, v, o, grad, lse, starts, ends, to_query, to_key, to_value = hosts
        for rows, seen in _sequences(starts, ends, None, (max_q, max_k)):
            heads, dtype = q.shape[1], q.dtype
            weights = (_scores(q[rows], k[seen], is_causal, scale) - lse[:, rows, None]).exp()
            g, out_ = (_by_head(x[rows], heads) for x in (grad, o))
            along = g @ _by_head(v[seen], heads).transpose(1, 2) - (g * out_).sum(-1, keepdim=True)
            slopes = scale * weights * along
            to_query[rows] = (slopes @ _by_head(k[seen], heads)).transpose(0, 1).to(dtype)
            of_key = slopes.transpose(1, 2) @ _by_head(q[rows], heads)
            to_key[seen] = _summed(of_key, k.shape[1]).to(dtype)
            to_value[seen] = _summed(weights.transpose(1, 2) @ g, k.shape[1]).to(dtype)

    _launch("backward", run, [*given, *grads])
    return grads  # type: ignore[return-value]
