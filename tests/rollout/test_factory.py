"""Why `rollout_engine: auto` does not take vLLM, on a GPU that is only named."""

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from peft import get_peft_model

from rlhf_pg import GRPOConfig
from rlhf_pg.rollout import factory
from rlhf_pg.rollout.vllm import in_process
from rlhf_pg.rollout.vllm.in_process import lacking
from tests.tiny import adapter, tiny_model

TIED = {"tie_word_embeddings": True}


def asked(kind: str = "cuda", version: str | None = "0.32.0", **options: Any) -> str | None:
    model = options.pop("model", None) or tiny_model("llama")
    found = {"side_effect": PackageNotFoundError} if version is None else {"return_value": version}
    with (
        patch.object(in_process, "lacking", lambda _: None),
        patch.object(factory, "version", **found),
    ):
        return factory.reason_against(GRPOConfig(**options), model, kind)


def test_plain_gpu_run_allows_vllm():
    assert asked() is None
    assert asked(stop=("x",), dtype="bfloat16", use_peft=True) is None
    assert asked(model=get_peft_model(tiny_model("llama", **TIED), adapter())) is None
    assert asked(vllm_gpu_memory_utilization=0.5, vllm_max_model_length=9) is None


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("the device is cpu", {"kind": "cpu"}),
        ("vLLM is not installed", {"version": None}),
        ("the installed vLLM is version 0.34.0: use", {"version": "0.34.0"}),
        ("vLLM has no float64", {"dtype": "float64"}),
        ("rollout_cache_tokens is set", {"rollout_cache_tokens": 100}),
        ("raise the temperature to 0.01", {"temperature": 0.009}),
    ],
)
def test_unsupported_run_gives_reason_against_vllm(said, options):
    assert said in str(asked(**options))


def test_untransferable_weights_rule_out_vllm():
    quantized = tiny_model("llama")
    quantized.is_quantized = True
    assert asked(model=quantized) == "the weights are quantized (load_in_4bit)"
    head = adapter(target_modules=["q_proj", "lm_head"])
    trained = adapter(target_modules=["q_proj"], modules_to_save=["lm_head"])
    for config in (head, trained):
        tied = get_peft_model(tiny_model("llama", **TIED), config)
        assert str(asked(model=tied)).startswith("the adapter changes one end of tied weights (")
        own = get_peft_model(tiny_model("llama", tie_word_embeddings=False), config)
        assert asked(model=own) is None


def test_only_native_vllm_model_class_is_accepted(monkeypatch):
    classes = {
        "LlamaForCausalLM": SimpleNamespace(class_name="LlamaForCausalLM"),
        "GPTNeoXForCausalLM": SimpleNamespace(class_name="TransformersForCausalLM"),
        "Qwen2ForCausalLM": object(),  # one that somebody has registered
    }
    registry = SimpleNamespace(models=classes)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    assert lacking(tiny_model("llama")) is None
    assert lacking(get_peft_model(tiny_model("llama"), adapter())) is None
    assert lacking(tiny_model("qwen2")) is None
    assert lacking(tiny_model("gpt_neox")) == "vLLM has no GPTNeoXForCausalLM of its own"
    assert lacking(tiny_model("opt")) == "vLLM has no OPTForCausalLM of its own"
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert str(lacking(tiny_model("llama"))).startswith("vLLM cannot be imported (")
