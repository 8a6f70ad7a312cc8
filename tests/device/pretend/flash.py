"""The attention kernels of GPUs that CPUs lack: FlashAttention for sequences of any length.

One kernel each, in float32, and as strict as CUDA's about dtypes and shapes.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.device.pretend.extension import ext

_library = torch.library.Library("aten", "IMPL")  # it is there as long as this is


def install() -> None:
    """Let the device have them."""
    _library.impl("_flash_attention_forward", _forward, "CUDA")
    _library.impl("_flash_attention_backward", _backward, "CUDA")


def _check(tensors: dict[str, Tensor], ends: dict[str, Tensor | None]) -> None:
    """As `mha_varlen_fwd` of torch does."""
    query, key = tensors["query"], tensors["key"]
    for name, x in tensors.items():
        if not x.is_cuda:
            raise RuntimeError(f"{name} must be on CUDA (pretend flash attention)")
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type (pretend)")
        if x.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension (pretend)")
        if x.dim() != 3 or x.shape[2] != query.shape[2]:
            raise RuntimeError(f"{name} has shape {tuple(x.shape)} (pretend flash attention)")
    if query.shape[2] > 256 or query.shape[2] % 8:
        raise RuntimeError("FlashAttention takes heads of up to 256, in multiples of 8 (pretend)")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for name, x in ends.items():
        if x is not None and (not x.is_cuda or x.dtype != torch.int32 or not x.is_contiguous()):
            raise RuntimeError(f"{name} must be contiguous int32 on CUDA (pretend flash attention)")


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
    _check(
        {"query": query, "key": key, "value": value},
        {"cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k, "seqused_k": seqused_k},
    )
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logsum = torch.empty(query.shape[1], query.shape[0], device=query.device)
    q, k, v, to, to_logsum, starts, ends = map(
        ext.host, (query, key, value, out, logsum, cum_seq_q, cum_seq_k)
    )
    used = None if seqused_k is None else ext.host(seqused_k)

    def run() -> None:
        for rows, seen in _sequences(starts, ends, used, (max_q, max_k)):
            scores = _scores(q[rows], k[seen], is_causal, scale)
            to_logsum[:, rows] = logsum = scores.logsumexp(-1)
            weights = (scores - logsum[..., None]).exp().nan_to_num(0.0)  # 0 where nothing is seen
            to[rows] = (weights @ _by_head(v[seen], q.shape[1])).transpose(0, 1).to(to.dtype)

    ext.launch("aten::_flash_attention_forward", run)
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return out, logsum, nothing, nothing, torch.empty(0, dtype=query.dtype, device=query.device)


def _backward(
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
    inputs = {"query": query, "key": key, "value": value, "grad_out": grad_out}
    _check(inputs, {"cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k})
    scale = query.shape[2] ** -0.5 if scale is None else scale
    grads = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    q, k, v, o, grad, lse, starts, ends = map(
        ext.host, (query, key, value, out, grad_out, logsumexp, cum_seq_q, cum_seq_k)
    )
    to_query, to_key, to_value = map(ext.host, grads)

    def run() -> None:
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

    ext.launch("aten::_flash_attention_backward", run)
    return grads  # type: ignore[return-value]
