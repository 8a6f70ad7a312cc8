"""Adapters: what is shared and what is copied, what they add, and how they come and go."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import IA3Config, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_pg.config.inputs import AdapterConfig
from rlhf_pg.models.adapters import add_adapter, adds_nothing, merge, merge_loss, share_frozen
from rlhf_pg.models.critic import new_critic
from rlhf_pg.models.loading import adapter_of, load_model, load_tokenizer, load_weights
from rlhf_pg.models.policy import Policy, Reference
from tests.models.architectures import build
from tests.models.test_loading import make_tokenizer
from tests.models.test_packing import batch_of
from tests.models.test_policy import rollout
from tests.models.test_reference import train_a_step
from tests.tiny import adapter, stir, tiny_model

IDS = torch.tensor([[5, 9, 3, 31, 17, 8]])


@pytest.fixture(scope="module")
def base_path(tmp_path_factory):
    """A saved model without an adapter."""
    path = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def adapter_path(base_path, tmp_path_factory):
    """A trained adapter on it."""
    path = tmp_path_factory.mktemp("adapter")
    adapted(base_path).save_pretrained(path)
    return str(path)


def adapted(base_path, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return stir(add_adapter(load_model(base_path, dtype), adapter()), seed)


@pytest.fixture(autouse=True)
def seeded():
    """New adapters are random."""
    torch.manual_seed(0)


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def storages(*modules):
    """Where the tensors of the modules are, each place once."""
    return {p.data_ptr() for module in modules for p in module.parameters()}


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_share_frozen_copies_only_trained_tensors():
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    twin = share_frozen(model)
    for (name, own), (other, copied) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert name == other
        assert (own is copied) == (not own.requires_grad)
        assert (own.data_ptr() == copied.data_ptr()) == (not own.requires_grad)
        assert own.equal(copied)
        assert own.requires_grad == copied.requires_grad
    assert len(trained(model)) == 12  # of 21: a layer has nine


@pytest.mark.parametrize("frozen", [True, False])
def test_tied_weights_stay_tied(frozen):
    model = tiny_model("llama", tie_word_embeddings=True).requires_grad_(not frozen)
    twin = share_frozen(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert (twin.lm_head.weight is model.lm_head.weight) == frozen


def test_base_weights_are_in_memory_once():
    base = tiny_model("llama")
    size = len(storages(base))
    policy = Policy(add_adapter(base, adapter()))
    of_adapter = len(trained(policy.model))
    critic = new_critic(policy.model, None, torch.float32)
    assert len(storages(policy, Reference(policy), critic)) == size + 2 * of_adapter + 2
    stir(policy)
    assert len(storages(policy, Reference(policy), critic)) == size + 3 * of_adapter + 2


@pytest.mark.parametrize(
    ("targets", "wrong", "near"),
    [
        (["self_attn.q_proj", "mlp.o_proj"], "mlp.o_proj", "o_proj"),
        (r".*\.attention\.(q|k)", r".*\.attention\.(q|k)", "q_proj"),
    ],
)
def test_unmatched_target_raises_with_suggestion(targets, wrong, near):
    with pytest.raises(ValueError, match=rf"{re.escape(repr(wrong))} matches no .*: .*{near}"):
        add_adapter(tiny_model("llama"), adapter(target_modules=targets))


@pytest.mark.parametrize(
    ("arch", "targets", "adapters"),
    [
        ("llama", "all-linear", 14),
        ("llama", ["q_proj", "mlp.up_proj"], 4),
        ("llama", r".*\.1\..*\.(q|k)_proj", 2),
        ("gpt2", "all-linear", 8),
    ],
)
def test_only_adapters_of_targets_train(arch, targets, adapters):
    model = add_adapter(tiny_model(arch), adapter(target_modules=targets))
    assert len(trained(model)) == 2 * adapters
    assert all(".lora_" in name for name in trained(model))


def lora(r, alpha, dropout, targets):
    keys = {"lora_r": r, "lora_alpha": alpha, "lora_dropout": dropout}
    return adapter_of(AdapterConfig(use_peft=True, lora_target_modules=targets, **keys), None)


@pytest.mark.parametrize("arch", ["phimoe", "llama4_text", "gemma3n"])
def test_every_default_target_adapter_gets_gradient(arch):
    """Routers that return a tuple have none; Gemma3n clamps weights in place in train mode."""
    policy = Policy(stir(add_adapter(build(arch), lora(2, 4.0, 0.0, None)))).train()
    policy(batch_of()).logprobs.sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
    assert len(grads) >= 16
    assert all(grad is not None and grad.any() for grad in grads.values())


@pytest.mark.parametrize(
    ("options", "nothing"),
    [
        ({}, True),
        ({"use_rslora": True}, True),
        ({"init_lora_weights": False}, False),
        ({"init_lora_weights": "pissa"}, False),  # it changes the base weights
        ({"use_dora": True}, False),
        ({"modules_to_save": ["norm"]}, False),
        ({"bias": "all"}, False),
    ],
)
def test_adds_nothing_holds_only_for_fresh_lora(options, nothing):
    base = tiny_model("phi" if "bias" in options else "llama")
    expected, model = logits(base), add_adapter(base, adapter(**options))
    assert adds_nothing(model) == nothing
    if nothing:
        assert logits(model).equal(expected)
        assert not adds_nothing(stir(model))
    assert not adds_nothing(tiny_model("llama"))
    assert not adds_nothing(add_adapter(tiny_model("llama"), IA3Config(task_type="CAUSAL_LM")))


def test_reference_of_fresh_adapter_is_base_model():
    base = tiny_model("llama")
    expected = Policy(tiny_model("llama"))(rollout()).logprobs
    policy = Policy(add_adapter(base, adapter()))
    reference = Reference(policy)
    assert not any("lora" in name for name, _ in reference.named_modules())
    assert not any("lora" in name for name, _ in reference.named_parameters())
    assert reference(rollout()).equal(expected)
    for _ in range(2):  # B moves first, then A
        train_a_step(policy)
    assert not policy(rollout()).logprobs.equal(expected)
    assert reference(rollout()).equal(expected)
    assert isinstance(policy.model, PeftModel)


@pytest.mark.parametrize("options", [{}, {"init_lora_weights": "pissa"}])
@torch.no_grad()
def test_reference_of_nonzero_adapter_is_initial_policy(options):
    model = add_adapter(tiny_model("llama"), adapter(**options))
    policy = Policy(model if options.get("init_lora_weights") else stir(model))
    reference, expected = Reference(policy), policy(rollout()).logprobs
    assert reference(rollout()).equal(expected)  # the KL is exactly 0
    with torch.enable_grad():
        train_a_step(policy)
    assert (policy(rollout()).logprobs - expected).abs().max() > 1e-3
    assert reference(rollout()).equal(expected)
    assert not any(p.requires_grad for p in reference.parameters())
    assert trained(policy)


def test_loaded_adapter_continues_training(base_path, adapter_path):
    model, original = load_model(adapter_path, torch.float32), adapted(base_path)
    assert trained(model).keys() == trained(original).keys()
    weights = dict(original.named_parameters())
    assert all(weights[name].equal(p) for name, p in model.named_parameters())
    assert logits(model).equal(logits(original))
    with pytest.raises(ValueError, match=r"comes with an adapter.*leave peft_config"):
        add_adapter(model, adapter())


@pytest.mark.parametrize(
    ("how", "base", "wide"),
    [
        *((how, torch.bfloat16, torch.float32) for how in ("new", "path", "object")),
        ("new", torch.float64, torch.float64),
    ],
)
def test_adapters_have_at_least_float32(how, base, wide, base_path, adapter_path):
    if how == "new":
        model = add_adapter(load_model(base_path, base), adapter())
    else:
        given = adapter_path if how == "path" else adapted(base_path)
        model = load_model(given, base)
    assert {p.dtype for p in trained(model).values()} == {wide}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {base}


def on_another_base(adapter_path, tmp_path, base, **config):
    """The adapter again, with another name of its base model in its config."""
    path = tmp_path / "moved"
    path.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (path / file).write_bytes((Path(adapter_path) / file).read_bytes())
    saved = json.loads((path / "adapter_config.json").read_text())
    saved |= {"base_model_name_or_path": base} | config
    (path / "adapter_config.json").write_text(json.dumps(saved))
    return str(path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, "there is no model directory"),
        ({"num_hidden_layers": 1}, "14 tensors are only in the file or the model"),
        ({"hidden_size": 16}, "size mismatch"),
    ],
)
def test_mismatched_adapter_raises_with_both_names(shape, message, adapter_path, tmp_path):
    base = str(tmp_path / "base")
    if shape is not None:
        tiny_model("llama", **shape).save_pretrained(base)
    path = on_another_base(adapter_path, tmp_path, base)
    both = f"the adapter {path} does not fit its base model '{base}'"
    with pytest.raises(ValueError, match=rf"^{both}.*: .*{message}"):
        load_model(path, torch.float32)


def test_adapter_without_base_name_raises(adapter_path, tmp_path):
    path = on_another_base(adapter_path, tmp_path, None)
    with pytest.raises(ValueError, match=r"moved does not name its base model"):
        load_model(path, torch.float32)


def test_adapter_tokenizer_overrides_base_tokenizer(base_path, adapter_path, tmp_path):
    base, path = tmp_path / "base", on_another_base(adapter_path, tmp_path, str(tmp_path / "base"))
    tiny_model("llama").save_pretrained(base)
    make_tokenizer(eos_token="<2>", pad_token="<0>").save_pretrained(base)
    assert load_tokenizer(None, load_model(path, torch.float32)).eos_token == "<2>"
    make_tokenizer(eos_token="<7>", pad_token="<0>").save_pretrained(path)
    assert load_tokenizer(None, load_model(path, torch.float32)).eos_token == "<7>"


def test_model_saved_without_tokenizer_raises(tmp_path):
    """For Qwen `AutoTokenizer` makes up an empty one."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer was saved .*processing_class"):
        load_tokenizer(None, load_model(tmp_path, torch.float32))


def test_second_adapter_raises():
    model = add_adapter(tiny_model("llama"), adapter())
    model.add_adapter("poet", adapter())
    with pytest.raises(ValueError, match="the adapters default, poet"):
        load_model(model, torch.float32)


def test_prompt_tuning_raises():
    """The critic reads a trunk, which has no room for it."""
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"PromptTuningConfig.*use LoraConfig"):
        add_adapter(tiny_model("llama"), config)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_merged_model_matches_and_copies_only_changed_weights(options):
    model = stir(add_adapter(tiny_model("llama"), adapter(lora_alpha=1, **options)))
    weights = {name: (p, p.clone()) for name, p in model.named_parameters()}
    expected, plain = logits(model), merge(model)
    assert not isinstance(plain, PeftModel)
    assert plain.state_dict().keys() == tiny_model("llama").state_dict().keys()
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-4)
    embedding = model.get_input_embeddings().weight
    assert plain.get_input_embeddings().weight is embedding
    changed = {name: p for name, p in plain.named_parameters() if name.endswith("proj.weight")}
    assert len(changed) == 14
    assert {p.data_ptr() for p in changed.values()}.isdisjoint(storages(model))
    assert all(weights[name][0] is p for name, p in model.named_parameters())
    assert all(weights[name][1].equal(p) for name, p in model.named_parameters())
    assert logits(model).equal(expected)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_merging_one_tied_weight_keeps_other(target, tmp_path):
    base = stir(tiny_model("llama", tie_word_embeddings=True))
    model = stir(add_adapter(base, adapter(lora_alpha=1, target_modules=["q_proj", target])))
    plain = merge(model)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)
    assert base.config.tie_word_embeddings
    plain.save_pretrained(tmp_path)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(restored), logits(model), rtol=0, atol=1e-4)


def test_restoring_adapter_with_changed_config_raises(tmp_path):
    """The tensors would fit."""
    stir(add_adapter(tiny_model("llama"), adapter())).save_pretrained(tmp_path)
    model = add_adapter(tiny_model("llama"), adapter(lora_alpha=99))
    with pytest.raises(ValueError, match=r"lora_alpha .*the same peft_config"):
        load_weights(model, tmp_path)
    assert adds_nothing(model)


@pytest.mark.parametrize(
    ("delta", "lost"),
    # Next to 1, bfloat16 has 1 + 2^-7 and no number between.
    [(2**-10, 1.0), (2**-7, 0.0), (2**-7 + 2**-9, 0.2), (0.0, 0.0)],
)
def test_bf16_merge_loss_by_hand(delta, lost):
    model = tiny_model("llama", dtype=torch.bfloat16)
    model = get_peft_model(model, adapter(r=1, lora_alpha=1, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            is_a_or_base = "lora_B" not in name
            nn.init.constant_(parameter, 1.0 if is_a_or_base else delta)
            parameter.data = parameter.data.to(torch.bfloat16 if "base" in name else torch.float32)
    assert merge_loss(model) == pytest.approx(lost, abs=1e-6)


def test_float32_merge_is_almost_lossless():
    assert merge_loss(stir(get_peft_model(tiny_model("llama"), adapter()))) < 1e-6
    model = tiny_model("llama", dtype=torch.bfloat16)
    assert merge(model) is model
    assert merge_loss(model) == 0
