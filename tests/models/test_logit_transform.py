"""What stands between a head and the logits, measured on models that are known to do it."""

from typing import Any

import pytest
import torch

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.lm_head import ChunkedLMHead, LogitTransform, logit_transform_of, trunk
from tests.tiny import ARCHS, adapter, stir, tiny_model

GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2}
FINISHED: dict[str, tuple[dict[str, Any], LogitTransform]] = {
    "cohere": (GROUPED | {"logit_scale": 0.3}, LogitTransform(0.3)),
    "granite": (GROUPED | {"logits_scaling": 13.0}, LogitTransform(1 / 13)),
    "gemma2": (GROUPED | {"head_dim": 8, "final_logit_softcapping": 1.5}, LogitTransform(1.0, 1.5)),
}


def close(transform, other):
    assert transform is not None
    return transform.scale == pytest.approx(other.scale) and transform.cap == pytest.approx(
        other.cap
    )


def test_plain_model_has_identity_transform() -> None:
    assert all(logit_transform_of(tiny_model(arch)) == LogitTransform() for arch in ARCHS)
    assert logit_transform_of(torch.nn.Linear(2, 2)) is None


def test_model_without_known_trunk_has_no_transform() -> None:
    model = tiny_model("llama4_text", **GROUPED, num_local_experts=2, attention_chunk_size=16)
    assert trunk(model) is model
    assert logit_transform_of(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", FINISHED)
def test_scale_and_soft_cap_are_found_for_tiny_logits(arch, dtype) -> None:
    """Logits far below the cap look as if there were none."""
    options, expected = FINISHED[arch]
    model = tiny_model(arch, dtype=dtype, scale=0.001, **options)
    assert close(logit_transform_of(model), expected)
    assert close(logit_transform_of(model.to("meta")), expected)  # without numbers


@pytest.mark.parametrize("arch", FINISHED)
def test_scores_match_model_logits(arch) -> None:
    options, _ = FINISHED[arch]
    model = tiny_model(arch, **options)
    ids, tokens = torch.arange(9)[None], torch.arange(9).flip(0)
    transform = logit_transform_of(model)
    assert transform is not None
    hidden = trunk(model)(ids).last_hidden_state[0]
    logprobs, entropies = ChunkedLMHead(model, 0.7, True, 3, transform)(hidden, tokens)
    everywhere = (model(ids).logits[0].double() / 0.7).log_softmax(-1)
    expected = everywhere[torch.arange(9), tokens]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    spread = -(everywhere.exp() * everywhere).sum(-1)
    torch.testing.assert_close(entropies.double(), spread, rtol=1e-5, atol=1e-5)
    weights = list(model.parameters())
    slopes = torch.linspace(-1, 2, 9)
    found = torch.autograd.grad((slopes * (logprobs + entropies)).sum(), weights)
    wanted = torch.autograd.grad((slopes * (expected + spread)).sum(), weights)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_head_with_other_input_has_no_transform() -> None:
    model = tiny_model("minicpm3")  # it scales the hidden states first
    assert logit_transform_of(model) is None
    assert logit_transform_of(model.to("meta")) is None


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.clamp(-9, 9), lambda x: x[1:]])
def test_other_logit_changes_have_no_transform(monkeypatch, change) -> None:
    model = tiny_model("llama")
    forward = model.forward

    def changed(**inputs):
        output = forward(**inputs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(model, "forward", changed)
    assert logit_transform_of(model) is None


def test_adapters_and_dropout_keep_identity_transform() -> None:
    options = {"target_modules": ["lm_head", "q_proj"], "lora_dropout": 0.5}
    model = stir(add_adapter(tiny_model("llama"), adapter(**options))).train()
    model.get_base_model().lm_head.eval()
    modes = [part.training for part in model.modules()]
    assert logit_transform_of(model) == LogitTransform()
    assert [part.training for part in model.modules()] == modes
    assert not model.get_output_embeddings()._forward_hooks
