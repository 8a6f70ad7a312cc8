"""Models whose attention is unlike the others': sampled right, or not in the fast way."""

import pytest
import torch
import transformers

from rlhf_pg.models.attention import attention_support
from rlhf_pg.rollout import NativeEngine, Request
from rlhf_pg.rollout.native.continuous_batching import BatchingSession
from rlhf_pg.rollout.token_sampling import Stopping
from tests.rollout.native.test_engine import EOS, PAD, PARAMS, PROMPTS, assert_teacher_forced
from tests.tiny import stir

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
TWO_WIDTHS = {
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 48,
    "vocab_size_per_layer_input": 48,
    "hidden_size_per_layer_input": 8,
}


def model_of(name: str, config: str, **options) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES, **options)
    return stir(getattr(transformers, name)(made).eval())


def latent():
    return model_of("DeepseekV3ForCausalLM", "DeepseekV3Config", **LATENT)


def two_widths():
    return model_of("Gemma4ForCausalLM", "Gemma4TextConfig", **TWO_WIDTHS)


@pytest.mark.parametrize("make", [latent, two_widths])
def test_keys_and_values_may_have_any_width(make):
    """Values narrower than keys; layers of two widths."""
    model = make()
    assert attention_support(model).unsupported_reason is None
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 3, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)


@pytest.mark.parametrize("make", [latent, two_widths])
def test_bytes_per_token_match_stored_size(make):
    model = make()
    session = BatchingSession(model, PARAMS, 0, Stopping([]), 1000)
    session.add(Request(tokens=[1, 2, 3], prompt_index=0))
    with torch.no_grad():
        session.step()
    store = session.prompt_cache
    size = sum(x.nbytes for pair in store._layers.values() for x in pair)
    assert attention_support(model).bytes_per_token == size / (store.slots * store.width)


@pytest.mark.parametrize(
    ("name", "config", "options", "reason"),
    [
        ("DiffLlamaForCausalLM", "DiffLlamaConfig", {}, "attends twice"),
        ("DogeForCausalLM", "DogeConfig", {}, "the model's own mask"),
    ],
)
def test_unsupported_attention_is_not_replaced(name, config, options, reason):
    model = model_of(name, config, **options)
    assert reason in attention_support(model).unsupported_reason
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 2, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)
