"""Native decoding on a device: the ids of the CPU, and memory given back."""

import gc

import pytest
import torch

from rlhf_pg.rollout import NativeEngine, SamplingParams
from tests.rollout.native.test_engine import assert_teacher_forced
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
PARAMS = SamplingParams(max_tokens=100)


def engine_on(where: str, arch: str, dtype: torch.dtype = torch.float32, **options) -> NativeEngine:
    model = tiny_model(arch, max_position_embeddings=128, dtype=dtype).to(where)
    return NativeEngine(model, [2, 3], 0, **options)


@pytest.mark.parametrize(
    ("arch", "cache_tokens"), [("qwen3", None), ("gpt2", None), ("llama", 700)]
)
def test_sampled_ids_match_cpu(arch, cache_tokens):
    """Rows that enter, leave and move, and stores that grow."""
    sampled = [
        [
            completion.tokens
            for completion in engine_on(where, arch, cache_tokens=cache_tokens).generate(
                PROMPTS, 6, PARAMS, seed=0
            )
        ]
        for where in ("cpu", "cuda")
    ]
    assert sampled[0] == sampled[1]


def test_bf16_logprobs_match_plain_forward():
    engine = engine_on("cuda", "qwen3", torch.bfloat16)
    completions = engine.generate(PROMPTS, 4, SamplingParams(max_tokens=60), seed=0)
    model = tiny_model("qwen3", max_position_embeddings=128, dtype=torch.bfloat16)
    assert_teacher_forced(model, PROMPTS, completions, atol=0.5, temperature=1.0)


def test_keys_and_values_are_freed_with_their_session():
    engine = engine_on("cuda", "qwen3")
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()  # what goes, goes without a search for garbage
    try:
        engine.generate(PROMPTS, 4, PARAMS, seed=0)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()
