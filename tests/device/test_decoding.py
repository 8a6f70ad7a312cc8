"""Native decoding on a device: the ids of the CPU, memory given back."""

import pytest
import torch

from rlhf_pg.rollout import NativeEngine, SamplingParams
from tests.device.pretend.extension import ext
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
PARAMS = SamplingParams(max_tokens=100)


def engine_on(where: str, arch: str = "qwen3", **options) -> NativeEngine:
    model = tiny_model(arch, max_position_embeddings=128, dtype=torch.float32).to(where)
    return NativeEngine(model, [2, 3], 0, **options)


@pytest.mark.parametrize(
    ("arch", "cache_tokens"), [("qwen3", None), ("gpt2", None), ("llama", 700)]
)
def test_sampled_ids_match_cpu(arch, cache_tokens) -> None:
    """Rows that enter, leave and move, stores that grow."""
    here, there = (
        engine_on(where, arch, cache_tokens=cache_tokens).generate(PROMPTS, 6, PARAMS, seed=0)
        for where in ("cpu", "cuda")
    )
    assert [c.tokens for c in here] == [c.tokens for c in there]


def test_room_counts_reserved_unused_memory() -> None:
    engine = engine_on("cuda")
    before = engine.room()
    taken = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    assert engine.room() < before
    del taken
    assert engine.room() == before


def test_deterministic_mode_draws_same_ids() -> None:
    """By torch's deterministic algorithms, which have no running sum of floats on a GPU."""
    plain = engine_on("cuda").generate(PROMPTS, 4, PARAMS, seed=0)
    torch.use_deterministic_algorithms(True)
    try:
        told = engine_on("cuda").generate(PROMPTS, 4, PARAMS, seed=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [c.tokens for c in told] == [c.tokens for c in plain]


def test_rollout_frees_its_memory() -> None:
    engine = engine_on("cuda")
    engine.generate(PROMPTS, 4, PARAMS, seed=0)  # what it keeps between rollouts is there now
    before = ext.allocated()
    engine.generate(PROMPTS, 4, PARAMS, seed=1)
    assert ext.allocated() <= before + 2**20
