"""Weights that are handed to another engine: those of the merged model, a layer at a time."""

import copy
import weakref
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from peft import IA3Config, get_peft_model
from safetensors.torch import load_file
from torch import nn

from rlhf_pg.models.adapters import merge, merge_loss
from rlhf_pg.rollout import RolloutError
from rlhf_pg.rollout.vllm.handover import merged_weights, published_weights
from rlhf_pg.rollout.vllm.in_process import VllmEngine
from rlhf_pg.runtime import FullWeights
from tests.rollout.vllm.fake_vllm import digests_of, joined
from tests.tiny import MIXTURES, adapter, stir, tiny_model

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
def test_handed_over_weights_match_merged_model(kind, tied):
    model = adapted(ADAPTERS[kind], tied)
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = dict(merge(model).named_parameters())
    handed = dict(merged_weights(model))
    assert list(handed) == list(expected)  # the parts of a layer in one go
    assert all(tensor.equal(expected[name]) for name, tensor in handed.items())
    assert all(p.equal(before[name]) for name, p in model.named_parameters())


def test_transposed_layers_match_merged_model():
    model = adapted(adapter(fan_in_fan_out=True), tied=True, arch="gpt2")
    expected = dict(merge(model).named_parameters())
    assert all(tensor.equal(expected[name]) for name, tensor in merged_weights(model))


def test_model_without_adapter_is_not_copied():
    model = tiny_model("llama", tie_word_embeddings=True)
    own = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in merged_weights(model)} == own


def test_one_merged_layer_is_in_memory_at_a_time():
    model = adapted(adapter())
    own = {p.data_ptr() for p in model.parameters()}
    copies: list[weakref.ref[Any]] = []
    weights = merged_weights(model)
    for _, tensor in weights:
        assert all(copy() is None for copy in copies[:-1])
        if tensor.data_ptr() not in own:
            copies.append(weakref.ref(tensor.untyped_storage()))
        del tensor
    assert len(copies) == 14  # seven matrices in each of two layers


@pytest.mark.parametrize("kind", [*ADAPTERS, "gemma", "gpt2", "mixtral"])
def test_sharded_weights_are_handed_over_a_part_at_a_time(kind):
    model = adapted(ADAPTERS[kind]) if kind in ADAPTERS else tiny_model(kind)
    expected = {name: tensor.clone() for name, tensor in published_weights(model)}
    lost = merge_loss(model)
    weights = FullWeights(model, splits=True)
    gathered = weights.by_parts(torch.device("cpu"))
    # Of an adapted layer: the base, and what the adapter adds.
    layers = [layer for layer in model.modules() if hasattr(layer, "base_layer")]
    largest = max((len(list(layer.parameters())) for layer in layers), default=1)
    for name, tensor in published_weights(weights.module, gathered):
        assert tensor.equal(expected.pop(name))
        assert sum(not p.is_meta for p in weights.module.parameters()) <= largest
    assert not expected
    assert merge_loss(weights.module, gathered) == lost
    assert all(p.is_meta for p in weights.module.parameters())


# Of one sparse layer, as vLLM 0.32 reads them (vllm/model_executor/models/{file}.py: what its
# `hf_to_vllm_mapper` and the `ckpt_names` of its experts turn into its own names, and the rest by
# the names of its modules); {e} is every expert.
W123 = [
    "block_sparse_moe.gate.weight",
    *(f"block_sparse_moe.experts.{{e}}.w{i}.weight" for i in (1, 2, 3)),
]
PROJ = ["mlp.gate.weight", *(f"mlp.experts.{{e}}.{p}_proj.weight" for p in ("gate", "up", "down"))]
SHARED = [f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down")]
READ_BY_VLLM = {
    "mixtral": W123,
    "phimoe": W123,
    "minimax_m2": [*W123, "block_sparse_moe.e_score_correction_bias"],
    "qwen3_moe": PROJ,
    "olmoe": PROJ,
    "deepseek_v3": [*PROJ, *SHARED, "mlp.gate.e_score_correction_bias"],
    "glm4_moe": [*PROJ, *SHARED, "mlp.gate.e_score_correction_bias"],
    "granitemoe": [
        f"block_sparse_moe.{part}.weight"
        for part in ("router.layer", "input_linear", "output_linear")
    ],
}


@pytest.mark.parametrize("arch", MIXTURES)
def test_expert_weights_have_names_read_by_vllm(arch):
    model = tiny_model(arch)
    handed = dict(published_weights(model))
    prefix = "model.layers.1."
    sparse = {
        name.removeprefix(prefix)
        for name in handed
        if name.startswith((f"{prefix}mlp.", f"{prefix}block_sparse_moe."))
    }
    assert sparse == {name.format(e=e) for name in READ_BY_VLLM[arch] for e in range(4)}


@pytest.mark.parametrize("arch", MIXTURES)
def test_handed_over_experts_match_checkpoint(arch, tmp_path):
    """To the last number, the biases of experts among them; loaded from one or made here."""
    model = tiny_model(arch)
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.uniform_()
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for own in (model, type(model).from_pretrained(tmp_path)):
        handed = dict(published_weights(own))
        assert handed.keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in handed.items())


@pytest.mark.parametrize("merges", [True, False])
def test_vllm_that_holds_no_adapter_is_refused(merges, caplog):
    model = adapted(adapter())
    caplog.set_level("INFO", "rlhf_pg")
    held: dict[str, torch.Tensor] = {}

    def rpc(method: str, kwargs: Any = None) -> Any:
        if method == "reload_weights":
            handed = dict(kwargs["weights_iterator"])
            if not merges:
                handed = dict(merged_weights(model.unload()))
            held.update(joined(handed))
            return [None]
        return [digests_of(held)]

    engine = object.__new__(VllmEngine)  # that of vLLM itself is not there
    engine.llm, engine._has_warned = MagicMock(collective_rpc=rpc), False
    weights = copy.deepcopy(model)
    if merges:
        engine._load(weights)
        assert "in 15 of 15 tensors" in caplog.text
    else:
        with pytest.raises(RolloutError, match="in 8 of 15 tensors"):
            engine._load(weights)


@pytest.mark.parametrize(("size", "lost"), [(1e-5, True), (1.0, False)])
def test_adapter_lost_in_rounding_is_logged_once(size, lost, caplog):
    model = get_peft_model(tiny_model("llama", dtype=torch.bfloat16), adapter())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, size)
    engine = object.__new__(VllmEngine)  # that of vLLM itself is not there
    engine.llm, engine._has_warned = MagicMock(), False
    for _ in range(2):
        engine._load(model)
    said = [r.getMessage() for r in caplog.records if r.name == "rlhf_pg.rollout.vllm.in_process"]
    assert len(said) == lost
    assert all("rollout_engine vllm" in text and "native" in text for text in said)
