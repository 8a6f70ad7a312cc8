"""Native decoding on a device: the ids of the CPU, and memory given back."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.rollout.engine import Request
from tests.device.pretend.extension import ext
from tests.rollout.native.test_engine import assert_teacher_forced
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
PARAMS = SamplingParams(max_tokens=100)


def engine_on(
    where: str,
    arch: str,
    dtype: torch.dtype = torch.float32,
    cache_tokens: int | None = None,
    **shape,
) -> NativeEngine:
    model = tiny_model(arch, max_position_embeddings=128, dtype=dtype, **shape).to(where)
    return NativeEngine(model, [2, 3], 0, cache_tokens=cache_tokens)


@pytest.mark.parametrize(
    ("arch", "cache_tokens"),
    [
        ("qwen3", None),
        ("gpt2", None),
        ("llama", 700),
        ("gemma2", None),  # capped scores
    ],
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


class Widened(TorchDispatchMode):
    """The bytes of the largest tensor that is cast to float32."""

    largest = 0

    def __torch_dispatch__(self, kernel, types, args=(), options=None):
        out = kernel(*args, **(options or {}))
        if "_to_copy" in str(kernel) and out.dtype == torch.float32 != args[0].dtype:
            self.largest = max(self.largest, args[0].nbytes)
        return out


def decode(layers: int) -> tuple[int, int, int, int]:
    """Tokens of each row in a call, its launches and waits, bytes of the largest widened tensor."""
    shape = {"num_hidden_layers": layers, "max_position_embeddings": 256}
    model = tiny_model("qwen3", dtype=torch.bfloat16, **shape)
    engine = NativeEngine(model.to("cuda"), [], 0)
    with engine.weights_synced(), engine.session(PARAMS, 0) as session:
        for number in range(4):
            session.add(Request(tokens=[5, 6] * 60, prompt_index=number, samples=range(4)))
        for _ in range(2):  # prompts, and what is made once
            session.step()
        [rows] = (inner.rows for inner in session.sessions.values())
        before = len(rows[0].tokens)
        launches = ext.kernels()
        waits = ext.syncs()
        with Widened() as widened:
            session.step()
        return (
            len(rows[0].tokens) - before,
            ext.kernels() - launches,
            ext.syncs() - waits,
            widened.largest,
        )


def test_added_token_waits_for_nothing_and_casts_no_cache() -> None:
    """Of the launches of a layer 53 are the model's; `generate` takes 61."""
    tokens, launches, waits, widened = decode(2)
    _, fewer, _, _ = decode(1)
    assert tokens == 8
    assert (launches - fewer) / tokens <= 70
    assert waits == 1
    of_prompts = 4 * 120 * 16 * 2  # bytes of their keys in one head
    assert widened < of_prompts / 2


def test_layers_add_no_waits() -> None:
    """Prompts that are computed, rows and prompts that leave, and others that enter."""
    waits = []
    for layers in (2, 4):
        engine = engine_on("cuda", "qwen3", num_hidden_layers=layers, cache_tokens=400)
        engine.eos_token_ids = []
        requests = []
        for number, prompt in enumerate(PROMPTS * 2):
            options = {"samples": range(3), "max_tokens": 3 + 5 * number}
            requests.append(Request(tokens=prompt, prompt_index=number, **options))
        with engine.weights_synced(), engine.session(SamplingParams(max_tokens=45), 0) as session:
            for request in requests:
                session.add(request)
            session.step()  # what is made once
            before = ext.syncs()
            while not session.idle:
                session.step()
        waits.append(ext.syncs() - before)
    assert waits[0] == waits[1]


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
