"""Models whose attention is unlike the others': sampled right, or not in the fast way."""

import pytest
import torch

from rlhf_pg.models.attention import attention_support
from rlhf_pg.rollout import NativeEngine, Request
from rlhf_pg.rollout.native.attention import Decode
from rlhf_pg.rollout.native.continuous_batching import BatchingSession
from rlhf_pg.rollout.token_sampling import Stopping
from tests.models.architectures import build
from tests.models.test_packing import KINDS
from tests.rollout.native.test_engine import EOS, PAD, PARAMS, PROMPTS, assert_teacher_forced

# Values narrower than keys; layers of two widths.
WIDTHS = {
    "deepseek_v3": {"v_head_dim": 6, "first_k_dense_replace": 3},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16},
}


@pytest.mark.parametrize("arch", WIDTHS)
def test_keys_and_values_may_have_any_width(arch):
    model = build(arch, **WIDTHS[arch])
    assert attention_support(model).unsupported_reason is None
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 3, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)


@pytest.mark.parametrize("arch", WIDTHS)
def test_bytes_per_token_match_stored_size(arch):
    model = build(arch, **WIDTHS[arch])
    session = BatchingSession(model, PARAMS, 0, Stopping([]), 1000)
    session.add(Request(tokens=[1, 2, 3], prompt_index=0))
    with torch.no_grad():
        session.step()
    store = session.prompt_cache
    size = sum(x.nbytes / (len(x) * x.shape[2]) for pair in store._layers.values() for x in pair)
    assert attention_support(model).bytes_per_token == size


@pytest.mark.parametrize(
    ("arch", "reason"), [("diffllama", "attends twice"), ("doge", "the model's own mask")]
)
def test_unsupported_attention_is_not_replaced(arch, reason):
    model = build(arch)
    assert reason in attention_support(model).unsupported_reason
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 2, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)


@pytest.mark.parametrize("how", ["", "little room", "one softmax"])
@pytest.mark.parametrize("arch", KINDS)
def test_windows_sinks_and_states_sample_as_generate(monkeypatch, caplog, arch, how):
    """The same ids with the same noise, also where rows wait for room and move between slots, and
    as a GPU computes it.
    """
    model = build(arch, **KINDS[arch])
    engine = NativeEngine(model, EOS, PAD)
    if how == "one softmax":
        monkeypatch.setattr(Decode, "_attend_in_parts", Decode._attend_at_once)
    if how == "little room":
        engine.cache_tokens = 30 + 5 * engine.row_tokens()
    fast = engine.generate(PROMPTS, 3, PARAMS, seed=1)
    assert "generate, which is slower" not in caplog.text
    monkeypatch.setattr(engine, "unsupported_reason", lambda longest: "of this test")
    plain = engine.generate(PROMPTS, 3, PARAMS, seed=1)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    for found, expected in zip(fast, plain, strict=True):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
