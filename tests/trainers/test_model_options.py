"""attn_implementation and model_init_kwargs are obeyed for every model of a run, or refused."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg import PPOTrainer
from rlhf_pg.models import loading
from rlhf_pg.models.attention import configs_of
from tests.tiny import tiny_model


def attention_of(model) -> set[str]:
    return {config._attn_implementation for config in configs_of(model)}


@pytest.mark.parametrize("given", ["path", "object"])
def test_attention_is_that_of_policy_reference_and_critic(make, model_path, given, caplog):
    model = model_path if given == "path" else AutoModelForCausalLM.from_pretrained(model_path)
    options = {"attn_implementation": "eager", "beta": 0.1}
    trainer = make(
        PPOTrainer,
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        **options,
        max_steps=1,
    )
    assert "attn_implementation eager is not used where rows are packed" in caplog.text
    assert attention_of(trainer.model) == {"eager"}
    assert attention_of(trainer.learner.reference.policy.model) == {"eager"}
    assert attention_of(trainer.critic.model) == {"eager"}
    trainer.train()


def test_chosen_attention_of_a_padded_model_is_used_in_silence(make, monkeypatch, caplog):
    monkeypatch.setattr("rlhf_pg.models.policy.packing_window", lambda *_, **options: 0.0)
    make(attn_implementation="eager")
    assert "attn_implementation" not in caplog.text


def test_loaded_critic_has_attention_and_fields_of_config(make, model_path):
    trainer = make(
        PPOTrainer,
        value_model_name_or_path=model_path,
        attn_implementation="eager",
        model_init_kwargs={"attention_dropout": 0.25, "revision": "main"},
    )
    for model in (trainer.model, trainer.critic.model):
        assert model.config.attention_dropout == 0.25
        assert attention_of(model) == {"eager"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn_implementation": "eagre"}, "eagre"),
        ({"model_init_kwargs": {"attention_dropuot": 0.1}}, "did you mean 'attention_dropout'"),
        ({"model_init_kwargs": {"token": "hf_x"}}, "must not have 'token'"),
        ({"model": tiny_model("llama"), "model_init_kwargs": {"revision": "main"}}, "for loading"),
        # A pickle would be run.
        ({"model_init_kwargs": {"weights_only": False}}, "is neither an argument"),
    ],
)
def test_unknown_option_raises_before_training(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_revision_reaches_tokenizer(make, monkeypatch):
    seen = []
    load = loading.AutoTokenizer.from_pretrained

    def noted(**options):
        seen.append(options["revision"])
        return load(**options)

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", noted)
    make(model_init_kwargs={"revision": "v2"})
    assert seen == ["v2"]


@pytest.mark.parametrize(
    ("asked", "dtype", "is_taken"),
    [
        ("bf16", "bfloat16", True),
        ("no", "float32", True),
        ("bf16", "float32", False),
        ("fp8", "bfloat16", False),
    ],
)
def test_precision_of_launcher_has_to_be_the_dtype(make, monkeypatch, asked, dtype, is_taken):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    if is_taken:
        assert str(make(dtype=dtype).model.dtype) == f"torch.{dtype}"
    else:
        with pytest.raises(ValueError, match=f"mixed_precision {asked}, but dtype is {dtype}"):
            make(dtype=dtype)


@pytest.mark.parametrize(
    ("asked", "dtype", "said"),
    [
        ("bf16", "float32", "set dtype to bfloat16"),
        ("fp8", "bfloat16", "launch with --mixed_precision no"),
    ],
)
def test_other_precision_of_launcher_is_refused(make, monkeypatch, asked, dtype, said):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    with pytest.raises(
        ValueError, match=f"mixed_precision {asked}, but dtype is {dtype}: .*{said}"
    ):
        make(dtype=dtype)
