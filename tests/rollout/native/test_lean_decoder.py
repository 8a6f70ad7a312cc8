"""The lean decoder against the forward pass of `transformers`, and where it is not used."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from rlhf_pg.models.attention import configs_of, replaced_attention
from rlhf_pg.rollout.native.decode_attention import KeyValues, Prefill
from rlhf_pg.rollout.native.kept import forward
from rlhf_pg.rollout.native.lean_decoder import LeanDecoder, agrees, lean_decoder
from tests.rollout.native.test_engine import PARAMS, PROMPTS, assert_teacher_forced, engine_of
from tests.tiny import ARCHS, adapter, tiny_model

# Beyond `ARCHS`: biases, tied weights, other ways to turn positions, parallel or not.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ARCHS),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral", {"head_dim": 16, "sliding_window": None}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("phi", {"partial_rotary_factor": 1.0, "num_key_value_heads": 4}),
    ("opt", {"enable_bias": False, "activation_function": "gelu"}),
]


def logits_of(decode: Callable[..., Tensor], lengths: list[int], keep: Tensor | int = 0) -> Tensor:
    """Logits of random rows of these lengths, one after another."""
    ids = torch.randint(3, 40, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    store = KeyValues(0, 256)
    store.reserve(len(lengths), max(lengths))
    with torch.no_grad():
        return decode(ids, positions, Prefill(store, range(len(lengths)), lengths), keep)


def exact_logits(model: PreTrainedModel, lengths: list[int]) -> Tensor:
    with replaced_attention(configs_of(model)):
        return logits_of(partial(forward, model), lengths)


def lean(model: PreTrainedModel) -> LeanDecoder:
    decoder = lean_decoder(model)
    assert decoder is not None
    return decoder


@pytest.mark.parametrize(("arch", "options"), VARIANTS)
def test_logits_match_transformers(arch, options):
    model = tiny_model(arch, max_position_embeddings=128, **options)
    # Beyond the 64 positions whose angles are computed at first.
    expected = exact_logits(model, [9, 9, 70])
    decoder = lean(model)
    torch.testing.assert_close(logits_of(decoder, [9, 9, 70]), expected, rtol=1e-5, atol=1e-5)
    keep = torch.tensor([8, 17, 87])
    kept = logits_of(decoder, [9, 9, 70], keep)
    torch.testing.assert_close(kept, expected[keep], rtol=1e-5, atol=1e-5)
    assert agrees(decoder, model)


def test_logits_are_same_where_onednn_packs_nothing(monkeypatch):
    model = tiny_model("gpt2")
    expected = exact_logits(model, [9, 20])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch.testing.assert_close(logits_of(lean(model), [9, 20]), expected, rtol=1e-5, atol=1e-5)


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.register_forward_hook(lambda *call: None)
    return model


def pre_hooked(model: PreTrainedModel) -> PreTrainedModel:
    model.model.norm.register_forward_pre_hook(lambda *call: None)
    return model


def with_own_forward(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[0].forward = model.model.layers[0].forward
    return model


class Own(LlamaForCausalLM):
    pass


class Coded(nn.Linear):
    """As the layers of quantized models are."""


def subclassed(model: PreTrainedModel) -> PreTrainedModel:
    return Own(model.config)


def coded(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[1].mlp.down_proj = Coded(48, 32, bias=False)
    return model


def coded_head(model: PreTrainedModel) -> PreTrainedModel:
    model.set_output_embeddings(Coded(32, 40, bias=False))
    return model


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    return get_peft_model(model, adapter()).base_model.model


@pytest.mark.parametrize(
    "change",
    [hooked, pre_hooked, with_own_forward, subclassed, coded, coded_head, adapted],
)
def test_changed_model_has_no_lean_decoder(change):
    model = tiny_model("llama")
    assert lean_decoder(model) is not None
    assert lean_decoder(change(model)) is None


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"dtype": torch.float64}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("phi", {"qk_layernorm": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"word_embed_proj_dim": 16}),
        ("mixtral", {}),
    ],
)
def test_other_decoder_has_no_lean_decoder(arch, options):
    assert lean_decoder(tiny_model(arch, **options)) is None


def test_model_that_computes_something_else_is_sampled_by_itself(monkeypatch, caplog):
    """A patch of the class, which no description of the model shows."""
    model, other = tiny_model("llama"), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * other(self, x))
    assert not agrees(lean(model), model)
    caplog.clear()
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING):
        completions = engine.generate(PROMPTS, 2, PARAMS, seed=0)
        engine.generate(PROMPTS, 2, PARAMS, seed=1)
    assert_teacher_forced(model, PROMPTS, completions)
    [record] = caplog.records  # for two rollouts
    assert "sampled by its own forward pass, which is slower" in record.message
    assert record.message.endswith("other llama models")
    assert engine.leans is False


def test_hook_added_later_is_called():
    model, calls = tiny_model("llama"), []
    engine = engine_of(model)
    engine.generate(PROMPTS, 1, PARAMS, seed=0)
    assert engine.leans
    model.model.norm.register_forward_hook(lambda *call: calls.append(1))
    engine.generate(PROMPTS, 1, PARAMS, seed=0)
    assert calls


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma"])
def test_new_weights_are_sampled_from(arch):
    model = tiny_model(arch)
    engine = engine_of(model)
    engine.generate(PROMPTS, 3, PARAMS, seed=0)
    assert engine.leans
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 3, PARAMS, seed=0))


def test_merged_adapter_is_sampled_from():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), adapter(init_lora_weights=False))
    engine = engine_of(model)
    assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 3, PARAMS, seed=0))
    assert engine.leans


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16_rounds_no_more_than_transformers_does(arch):
    model = tiny_model(arch, dtype=torch.bfloat16)
    own = exact_logits(model, [9, 20]).double()
    found = logits_of(lean(model), [9, 20]).double()
    assert agrees(lean(model), model)
    exact = exact_logits(model.float(), [9, 20]).double()
    assert (found - exact).norm() < 1.5 * (own - exact).norm() < 0.1 * exact.norm()
