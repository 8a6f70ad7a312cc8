"""Adapters in a run: all four algorithms, what they leave behind, and how they go on."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from rlhf_pg import PPOTrainer
from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.loading import load_model
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.tiny import adapter, stir, tiny_model
from tests.untimed import untimed

IDS = torch.tensor([[5, 6, 13, 9, 4, 16]])
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8.0}


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def weights(trainer):
    """Of policy and critic, as they are now: (trained, frozen) by name."""
    found = ({}, {})
    for name, p in trainer.learner.module.named_parameters():
        found[not p.requires_grad][name] = p.detach().clone()
    return found


def equal(left, right):
    return left.keys() == right.keys() and all(left[name].equal(p) for name, p in right.items())


@pytest.fixture(scope="module")
def adapter_path(model_path, tmp_path_factory):
    """An adapter that was trained before, with its tokenizer."""
    path = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    stir(add_adapter(load_model(model_path, torch.float32), adapter())).save_pretrained(path)
    arithmetic().new_model()[1].save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def deeper_path(tmp_path_factory):
    """A value model with the same tokens and one more layer."""
    model, tokenizer = arithmetic().new_model()
    model.config.update({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3})
    model.config.layer_types = ["full_attention"] * 3
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("deeper")
    type(model)(model.config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_lora_run_saves_loadable_and_merged_model(make, critic, model_path, tmp_path):
    options = {"beta": 0.1, "learning_rate": 1e-2, "save_merged": True}
    trainer = make(PPOTrainer, **LORA, **options, critic=critic)
    trained, frozen = weights(trainer)
    start = logits(trainer.model)
    trainer.train()
    now, still = weights(trainer)
    assert equal(frozen, still)
    assert all(".lora_" in name or "critic.head" in name for name in trained)
    assert not any(now[name].equal(p) for name, p in trained.items())

    final, expected = tmp_path / "run" / "final", logits(trainer.model)
    if critic == "shared":
        assert [x.name for x in (final / "critic").iterdir()] == ["value_head.safetensors"]
    assert (expected - start).abs().max() > 0.01
    assert not (final / "model.safetensors").exists()
    assert logits(AutoModelForCausalLM.from_pretrained(final)).equal(expected)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    assert logits(PeftModel.from_pretrained(base, final)).equal(expected)
    plain = AutoModelForCausalLM.from_pretrained(final / "merged")
    assert not any(".lora_" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)


def test_lora_keys_and_peft_config_give_same_run(make, tmp_path):
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", task_type="CAUSAL_LM")
    for name, options in {"keys": LORA, "object": {"peft_config": config}}.items():
        make(PPOTrainer, **options, max_steps=1, output_dir=str(tmp_path / name)).train()
    assert untimed(tmp_path / "keys") == untimed(tmp_path / "object")
    adapters = [
        tmp_path / name / "final" / "adapter_model.safetensors" for name in ("keys", "object")
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_value_model_of_other_architecture_gets_own_adapters_and_rate(make):
    """All linear layers of GPT-2, none of which has a name that the policy's have."""
    value_model = tiny_model("gpt2", vocab_size=20)
    options = {"value_learning_rate": 0.5, "max_steps": 1}
    trainer = make(PPOTrainer, **LORA, value_model=value_model, **options)
    trained = {name for name in weights(trainer)[0] if name.startswith("critic.model")}
    assert len(trained) == 2 * 2 * 4
    assert all("lora" in name for name in trained)
    rates = {id(p): g["lr"] for g in trainer.learner.optimizer.param_groups for p in g["params"]}
    for name, p in trainer.learner.module.named_parameters():
        expected = 0.5 if name.startswith("critic.") else 1e-3
        assert rates.get(id(p)) == (expected if p.requires_grad else None)
    trainer.train()


def test_loaded_adapter_trains_on_and_is_reference(make, adapter_path, deeper_path, tmp_path):
    """The reference is the adapter that it starts from, not its base model."""
    options = {"beta": 0.1, "learning_rate": 1e-2, "max_steps": 2, "value_model": deeper_path}
    trainer = make(PPOTrainer, model=adapter_path, **options)
    start = logits(trainer.model)
    assert start.equal(logits(AutoModelForCausalLM.from_pretrained(adapter_path)))
    trainer.train()
    kl = [line["kl"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert kl[0] == 0
    assert kl[1] > 1e-6
    assert logits(trainer.learner.reference.policy.model).equal(start)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert logits(final).equal(logits(trainer.model))


def test_second_adapter_is_refused(make, adapter_path):
    with pytest.raises(
        ValueError, match="there are two adapters: give peft_config or set use_peft"
    ):
        make(**LORA, peft_config=adapter())
    for options in ({"peft_config": adapter()}, LORA):
        with pytest.raises(ValueError, match=r"comes with an adapter.*leave peft_config"):
            make(model=adapter_path, **options)


def test_fully_frozen_model_is_refused(make, model_path, adapter_path):
    base = AutoModelForCausalLM.from_pretrained(model_path)
    model = PeftModel.from_pretrained(base, adapter_path)
    with pytest.raises(ValueError, match=r"every weight .* is frozen.*is_trainable=True"):
        make(model=model)


@pytest.mark.parametrize(
    ("critic", "message"), [("shared", "is for a separate"), ("separate", "is the policy")]
)
def test_policy_or_shared_critic_with_a_value_model_is_refused(make, model_path, critic, message):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    tokenizer = arithmetic().new_model()[1]
    options = {"model": model, "value_model": model, "processing_class": tokenizer}
    with pytest.raises(ValueError, match=f"value_model {message}"):
        make(PPOTrainer, critic=critic, **options)


def test_changed_models_on_resume_are_refused(make, model_path, deeper_path, tmp_path):
    def build(**options):
        return make(PPOTrainer, **({"beta": 0.0, "max_steps": 1, "save_steps": 1} | options))

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            build(**options).train(resume_from_checkpoint="latest")

    build().train()
    refused("another critic: resume with the same value_model", value_model=deeper_path)
    refused("critic was 'separate' and is 'shared'", critic="shared")

    build(**LORA).train()
    refused("use_peft was True and is False")
    other = load_model(model_path, torch.float32)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    arithmetic().new_model()[1].save_pretrained(tmp_path / "other")
    refused("another model: resume with the same base", **LORA, model=str(tmp_path / "other"))

    build(peft_config=adapter(lora_alpha=8)).train()
    refused("lora_alpha 8, but this one 99: .*peft_config", peft_config=adapter(lora_alpha=99))


def test_moved_base_model_resumes(make, model_path, tmp_path):
    """It is known by its weights, not by its path."""
    make(**LORA, save_steps=1, max_steps=1).train()
    moved = tmp_path / "moved"
    moved.symlink_to(model_path)
    rest = make(**LORA, save_steps=1, max_steps=2, model=str(moved))
    rest.train(resume_from_checkpoint="latest")
    assert rest.state.step == 2
    saved = json.loads(Path(tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(moved)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["q_proj"], "init_lora_weights": "eva"},
    ],
)
def test_adapter_that_cannot_be_merged_is_refused_before_training(make, model_path, options):
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **options)
    with pytest.raises(ValueError, match=r"peft_config|init_lora_weights"):
        make(model=model_path, peft_config=config, save_merged=True)
