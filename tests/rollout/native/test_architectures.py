"""Models whose attention is unlike the others': sampled right, or not in the fast way."""

import pytest
import torch

from rlhf_pg.models.attention import attention_support
from rlhf_pg.rollout import NativeEngine, Request
from rlhf_pg.rollout.native.continuous_batching import BatchingSession
from rlhf_pg.rollout.token_sampling import Stopping
from tests.models.architectures import build
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
    size = sum(x.nbytes for pair in store._layers.values() for x in pair)
    assert attention_support(model).bytes_per_token == size / (store.slots * store.width)


@pytest.mark.parametrize(
    ("arch", "reason"), [("diffllama", "attends twice"), ("doge", "the model's own mask")]
)
def test_unsupported_attention_is_not_replaced(arch, reason):
    model = build(arch)
    assert reason in attention_support(model).unsupported_reason
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 2, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)
