"""What inductor makes for an H100, without one: `make test-sm90`.

FlexAttention, forward and backward, of packed families in every form that a run has, and a step of
native decoding, whose kernels are counted. They are compiled to the end, and not run.
"""

from tests.device import compiler  # isort: skip  # before torch

import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_pg.models.gpu_attention import OnGPU
from tests.device.pretend import triton

# Query heads, key heads and their width of Qwen3-0.6B, Qwen2.5-7B, Llama-3-8B, and a tiny model.
HEADS = {"0.6B": (16, 8, 128), "7B": (28, 4, 128), "8B": (32, 8, 128), "tiny": (4, 2, 16)}
FAMILIES = {
    "few tokens": [(5, [3, 0, 4]), (2, [1])],
    "many": [(300, [100, 7, 260]), (1, []), (90, [1, 300])],
}
MOST = 20  # kernels of a decoder layer, in a step of decoding


def attention(name: str, families: str, dtype: torch.dtype, trains: bool) -> int:
    """Kernels that were compiled for it."""
    heads, own = HEADS[name], FAMILIES[families]
    tokens = sum(prompt + sum(completions) for prompt, completions in own)
    make: Any = lambda h: torch.ones(h, tokens, heads[2], dtype=dtype, device="cuda")  # noqa: E731
    query, key, value = (make(h).requires_grad_(trains) for h in (heads[0], heads[1], heads[1]))
    torch._dynamo.reset_code_caches()
    before = len(triton.compiled)
    with torch.set_grad_enabled(trains):
        out = OnGPU(own, torch.device("cuda")).by_flex(query, key, value, 0.1)
        if trains:
            out.sum().backward()
    return len(triton.compiled) - before


def attentions() -> Iterator[tuple[str, bool]]:
    for dtype in (torch.bfloat16, torch.float32):
        for name in HEADS:
            for families in FAMILIES:
                for trains in (True, False):
                    what = f"FlexAttention, {name}, {families}, {dtype}, " + "trains" * trains
                    count = attention(name, families, dtype, trains)
                    yield f"{what}: {count} kernels", count > 0


def main() -> int:
    """The number to exit with."""
    assert compiler
    warnings.simplefilter("ignore")
    triton.install()
    start, failed = time.perf_counter(), 0
    for what, passed in attentions():
        print(f"{'ok' if passed else 'FAILED':7} {what}", flush=True)
        failed += not passed
    print(f"{time.perf_counter() - start:.0f} s, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
