"""What inductor makes for an H100, without one: `make test-sm90`.

FlexAttention, forward and backward, of packed families in every form that a run has, and a step of
native decoding, whose kernels are counted. They are compiled to the end, and not run.
"""

from tests.device import compiler  # isort: skip  # before torch

import itertools
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.graph import GraphLowering
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf_pg.models.attention import configs_of, replaced_attention
from rlhf_pg.models.gpu_attention import OnGPU
from rlhf_pg.rollout import NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native.compiled import Compiled
from rlhf_pg.rollout.native.flash_attention import FlashDecode
from rlhf_pg.rollout.native.kept import forward
from tests.device.pretend import triton
from tests.device.pretend.extension import ext

# Query heads, key heads and their width of Qwen3-0.6B, Qwen2.5-7B, and a tiny model.
HEADS = {"0.6B": (16, 8, 128), "7B": (28, 4, 128), "tiny": (4, 2, 16)}
FAMILIES = {
    "few tokens": [(5, [3, 0, 4]), (2, [1])],
    "many": [(300, [100, 7, 260]), (1, []), (90, [1, 300])],
}
MOST = 20  # kernels of a decoder layer, in a step of decoding


def attention(heads: tuple[int, int, int], families: str, dtype: torch.dtype, trains: bool) -> int:
    """Kernels that are compiled for FlexAttention."""
    own = FAMILIES[families]
    tokens = sum(prompt + sum(completions) for prompt, completions in own)
    shapes = [(count, tokens, heads[2]) for count in (*heads[:2], heads[1])]
    query, key, value = (
        torch.ones(shape, dtype=dtype, device="cuda", requires_grad=trains) for shape in shapes
    )
    torch._dynamo.reset_code_caches()
    before = len(triton.compiled)
    with torch.set_grad_enabled(trains):
        out = OnGPU(own, torch.device("cuda")).by_flex(query, key, value, 0.1)
        if trains:
            out.sum().backward()
    return len(triton.compiled) - before


def attentions() -> Iterator[tuple[str, bool]]:
    """FlexAttention, for every kind of heads in bfloat16, and for one in float32."""
    kinds = [(name, torch.bfloat16) for name in HEADS] + [("0.6B", torch.float32)]
    for name, dtype in kinds:
        for families in FAMILIES:
            for trains in (True, False):
                count = attention(HEADS[name], families, dtype, trains)
                what = f"FlexAttention, {name}, {families}, {str(dtype)[6:]}"
                yield f"{what}{', trains' * trains}: {count} kernels", count > 0


def step(layers: int) -> tuple[int, int]:
    """Kernels of a decoding step of Qwen3-0.6B with so many layers: as it is, and compiled."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(**shape, **heads, vocab_size=1024, tie_word_embeddings=True)
    engine = NativeEngine(Qwen3ForCausalLM(config).to("cuda", torch.bfloat16), [], 0, None, 5000)
    asked: list[Any] = []

    def keep(*args: Any) -> Any:
        asked.append(args)
        return forward(*args)

    with (
        patch("rlhf_pg.rollout.native.engine.Compiled", lambda function: keep),
        engine.session(SamplingParams(max_tokens=40), seed=0) as session,
    ):
        session.add(Request(tokens=[5, 6, 7], prompt_index=0, samples=range(12)))
        session.add(Request(tokens=[8, 9], prompt_index=1, samples=range(12)))
        while not (asked and isinstance(asked[-1][3], FlashDecode)):
            session.step()
        with replaced_attention(configs_of(engine.model)):
            before = ext.kernels()
            forward(*asked[-1])
            return ext.kernels() - before, launches(asked[-1])


def launches(args: Any) -> int:
    """Kernels, of triton and of libraries, in the code that inductor makes of a step."""
    code: list[str] = []
    with patch.object(GraphLowering, "save_output_code", staticmethod(code.append)):
        compiled = Compiled(forward)
        compiled(*args)
    assert compiled.works
    body = code[-1][code[-1].index("def call(") :]
    called = r"\b(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.aten\.[\w.]+)\("
    return len(re.findall(called, body))


def decoding() -> Iterator[tuple[str, bool]]:
    """Kernels that a layer adds to a step of native decoding."""
    (plain, fused), (plainer, fuser) = step(1), step(2)
    what = f"decoding, Qwen3-0.6B: {plainer - plain} kernels a layer, {fuser - fused} compiled"
    yield what, fuser - fused <= MOST


def main() -> int:
    """The number to exit with."""
    assert compiler
    warnings.simplefilter("ignore")
    triton.install()
    start, failed = time.perf_counter(), 0
    for what, passed in itertools.chain(decoding(), attentions()):
        print(f"{'ok' if passed else 'FAILED':7} {what}", flush=True)
        failed += not passed
    print(f"{time.perf_counter() - start:.0f} s, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
