"""FlashAttention-2 as torch has it on CUDA, for a device that has not: see `install`.

It refuses what `mha_varlen_fwd` of torch refuses (aten/.../flash_attn/flash_api.cpp): other dtypes
than the two of 16 bits, heads of more than 256 numbers or not of a multiple of 8, lengths that are
not int32 and contiguous, strides in the last dimension. What it computes is a softmax in float32,
sequence by sequence, rounded at the end; rows of no sequence are NaN.
"""

from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []


def install(key: str = "CUDA", dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Make it the kernel of a dispatch key; `dtypes`: more that it takes, for tests on a CPU."""
    taken = (torch.bfloat16, torch.float16, *dtypes)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        return flash(query, key, value, *args, taken=taken, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, key)
    _libraries.append(library)  # it is gone when nobody has it any more


def check(query: Tensor, key: Tensor, value: Tensor, lengths: list[Tensor | None], taken: Any):
    if query.dtype not in taken:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if query.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if query.shape[-1] % 8:
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!")
    if query.shape[-1] != value.shape[-1] or key.shape != value.shape or query.dim() != 3:
        raise RuntimeError("mismatch of shapes")
    if query.shape[1] % key.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    for x in lengths:
        if x is not None and (x.dtype != torch.int32 or not x.is_contiguous()):
            raise RuntimeError("lengths must have dtype int32 and be contiguous")
        if x is not None and x.device != query.device:
            raise RuntimeError("lengths must be on CUDA")


def flash(
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
    taken: Any = (),
    **options: Any,
) -> tuple[Tensor, ...]:
    """(N,H,D) from query (N,H,D), key and value (.,K,D); and the log-sum-exp (H,N)."""
    assert not dropout_p
    assert not return_debug_mask
    assert not any(x is not None for x in options.values()), options
    check(query, key, value, [cum_seq_q, cum_seq_k, seqused_k], taken)
    sequences = cum_seq_q.numel() - 1
    if cum_seq_k.numel() != sequences + 1 or (
        seqused_k is not None and seqused_k.numel() != sequences
    ):
        raise RuntimeError("as many sequences of keys as of queries")
    out = torch.empty_like(query)
    logsum = torch.empty(query.shape[1], len(query), dtype=torch.float32, device=query.device)
    tensors = [query, key, value, cum_seq_q, cum_seq_k, out, logsum]
    tensors += [] if seqused_k is None else [seqused_k]
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def body(tensors: list[Tensor]) -> None:
        _sequences(*tensors, limits=(max_q, max_k), scale=scale, causal=is_causal)

    _launch(body, tensors)
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    return out, logsum, seed, torch.empty_like(seed[0]), query.new_empty(0)


def _launch(body: Any, tensors: list[Tensor]) -> None:
    """As one kernel: counted, recorded and replayed by the device."""
    if tensors[0].device.type == "cpu":
        body(tensors)
    else:
        from tests.device.pretend import cuda

        cuda.ext.kernel("aten::_flash_attention_forward", body, tensors)


def _sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    out: Tensor,
    logsum: Tensor,
    seqused_k: Tensor | None = None,
    *,
    limits: tuple[int, int],
    scale: float,
    causal: bool,
) -> None:
    out.fill_(torch.nan)  # as memory may be: rows of no sequence are not computed
    logsum.fill_(torch.nan)
    rows, starts = cum_seq_q.tolist(), cum_seq_k.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for i in range(len(rows) - 1):
        # No block of queries is started behind max_q, and no length may be beyond max_k.
        mine = slice(rows[i], min(rows[i + 1], rows[i] + limits[0]))
        length = starts[i + 1] - starts[i] if used is None else used[i]
        assert length <= limits[1], (length, limits)
        theirs = slice(starts[i], starts[i] + length)
        if mine.stop > mine.start:
            out[mine], logsum[:, mine] = _attend(
                query[mine], key[theirs], value[theirs], scale, causal
            )


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    copies = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(copies, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:  # the last query sees the last key
        late = torch.arange(k.shape[0]) > torch.arange(len(q))[:, None] + k.shape[0] - len(q)
        scores = scores.masked_fill(late, -torch.inf)
    logsum = scores.logsumexp(-1)
    weights = (scores - logsum[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), logsum
