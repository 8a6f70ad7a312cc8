"""Weights that are handed to another engine: those of the merged model, a layer at a time."""

import gc
import weakref
from typing import Any

import pytest
from peft import IA3Config, get_peft_model

from rlhf_pg import models
from rlhf_pg.rollout.handover import merged_weights
from tests.tiny import adapter, stir, tiny_model

ADAPTERS: dict[str, Any] = {
    "LoRA": adapter(),
    "DoRA": adapter(use_dora=True),
    "LoRA and a trained head": adapter(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "LoRA on the embedding": adapter(target_modules=["embed_tokens", "q_proj"]),
    "trained tokens": adapter(target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "IA3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
}


def adapted(config: Any, tied: bool = False, arch: str = "llama") -> Any:
    return stir(get_peft_model(tiny_model(arch, tie_word_embeddings=tied), config))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_weights_are_those_of_the_merged_model(kind, tied):
    model = adapted(ADAPTERS[kind], tied)
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = dict(models.merged(model).named_parameters())
    handed = dict(merged_weights(model))
    assert list(handed) == list(expected)  # the parts of a layer in one go
    assert all(tensor.equal(expected[name]) for name, tensor in handed.items())
    assert all(p.equal(before[name]) for name, p in model.named_parameters())


def test_layers_that_store_their_weights_transposed_too():
    model = adapted(adapter(fan_in_fan_out=True), tied=True, arch="gpt2")
    expected = dict(models.merged(model).named_parameters())
    assert all(tensor.equal(expected[name]) for name, tensor in merged_weights(model))


def test_a_model_without_an_adapter_is_not_copied():
    model = tiny_model("llama", tie_word_embeddings=True)
    own = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in merged_weights(model)} == own


def test_one_merged_layer_is_in_memory_at_a_time():
    model = adapted(adapter())
    own = {p.data_ptr() for p in model.parameters()}
    copies: list[weakref.ref[Any]] = []
    weights = merged_weights(model)
    for _, tensor in weights:
        gc.collect()
        assert all(copy() is None for copy in copies[:-1])
        if tensor.data_ptr() not in own:
            copies.append(weakref.ref(tensor.untyped_storage()))
        del tensor
    assert len(copies) == 14  # seven matrices in each of two layers
