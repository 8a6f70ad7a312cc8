"""attn_implementation and model_init_kwargs are obeyed for every model of a run, or refused."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg import GRPOConfig, PPOTrainer
from rlhf_pg.config.parse import dump, parse
from rlhf_pg.models import loading
from rlhf_pg.models.attention import configs_of
from rlhf_pg.report.run_files import read


def attention_of(model) -> set[str]:
    return {config._attn_implementation for config in configs_of(model)}


@pytest.mark.parametrize("given", ["path", "object"])
def test_attention_is_that_of_policy_reference_and_critic(make, model_path, given):
    model = model_path if given == "path" else AutoModelForCausalLM.from_pretrained(model_path)
    options = {"attn_implementation": "eager", "beta": 0.1}
    trainer = make(
        PPOTrainer,
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        **options,
        max_steps=1,
    )
    assert attention_of(trainer.model) == {"eager"}
    assert attention_of(trainer.learner.reference.policy.model) == {"eager"}
    assert attention_of(trainer.critic.model) == {"eager"}
    trainer.train()


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


def test_attention_changes_no_result(make, tmp_path):
    """Beyond rounding: passes that are packed have an attention of our own in either case."""
    for name in ("sdpa", "eager"):
        make(attn_implementation=name, output_dir=str(tmp_path / name)).train()
    lines = [read(tmp_path / name / "metrics.jsonl") for name in ("sdpa", "eager")]
    for one, other in zip(*lines, strict=True):
        assert one["reward"] == other["reward"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn_implementation": "eagre"}, "eagre"),
        ({"model_init_kwargs": {"attention_dropuot": 0.1}}, "did you mean 'attention_dropout'"),
        ({"model_init_kwargs": {"_commit_hash": "x"}}, "is neither an argument"),
        # A pickle would be run.
        ({"model_init_kwargs": {"weights_only": False}}, "is neither an argument"),
    ],
)
def test_unknown_option_raises_before_training(make, options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_options_for_loading_are_refused_for_object(make, model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with pytest.raises(ValueError, match=r"model_init_kwargs \(revision\) is for loading"):
        make(model=model, model_init_kwargs={"revision": "main"})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("dtype", "set dtype"),
        ("device_map", "the launcher chooses devices"),
        ("token", "config.yaml would keep a token"),
        ("trust_remote_code", "set trust_remote_code"),
    ],
)
def test_own_keys_are_refused_in_model_init_kwargs(key, said):
    with pytest.raises(ValueError, match=f"^model_init_kwargs must not have '{key}': .*{said}"):
        GRPOConfig(model_init_kwargs={key: False})


@pytest.mark.parametrize(
    "options",
    [{"attn_implementation": "somebody/kernels"}, {"model_init_kwargs": {"use_kernels": True}}],
)
def test_kernels_of_hub_need_trust(options):
    with pytest.raises(ValueError, match="trust_remote_code must be true for kernels of the Hub"):
        GRPOConfig(**options)
    assert GRPOConfig(**options, trust_remote_code=True)


def test_options_survive_yaml_and_flags(tmp_path):
    config = GRPOConfig(model_init_kwargs={"revision": "v1", "rope_theta": 1e6})
    dump(config, tmp_path / "config.yaml")
    assert parse(GRPOConfig, ["--config", str(tmp_path / "config.yaml")]) == config
    flags = ["--model_init_kwargs", '{"revision": "v1"}', "--attn_implementation", "sdpa"]
    parsed = parse(GRPOConfig, flags)
    assert (parsed.model_init_kwargs, parsed.attn_implementation) == ({"revision": "v1"}, "sdpa")
    assert GRPOConfig(model_init_kwargs=None).model_init_kwargs == {}


# -------------------------------------------------------------- values as transformers has them


def test_paths_and_absent_trackers_are_taken(model_path, tmp_path):
    config = GRPOConfig(
        output_dir=tmp_path / "a", model_name_or_path=Path(model_path), report_to=None
    )
    assert (config.output_dir, config.model_name_or_path) == (str(tmp_path / "a"), model_path)
    assert config.report_to == ()


@pytest.mark.parametrize("key", ["logging_steps", "save_steps", "eval_steps", "warmup_steps"])
def test_share_of_run_is_refused_and_whole_float_taken(key):
    assert getattr(GRPOConfig(**{key: 10.0}), key) == 10
    with pytest.raises(ValueError, match=f"^{key} must be"):
        GRPOConfig(**{key: 0.1})


# ------------------------------------------------------------------------------------ launchers


@pytest.mark.parametrize(
    ("asked", "dtype", "said"),
    [
        ("bf16", "float32", "set dtype to bfloat16"),
        ("bf16", "float64", "set dtype to bfloat16"),
        ("fp16", "float32", "launch with --mixed_precision no"),
        ("fp8", "bfloat16", "launch with --mixed_precision no"),
    ],
)
def test_other_precision_of_launcher_is_refused(make, monkeypatch, asked, dtype, said):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    with pytest.raises(
        ValueError, match=f"mixed_precision {asked}, but dtype is {dtype}: .*{said}"
    ):
        make(dtype=dtype)


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", "bfloat16"), ("no", "float32")])
def test_same_precision_of_launcher_is_taken(make, monkeypatch, asked, dtype):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    assert str(make(dtype=dtype).model.dtype) == f"torch.{dtype}"


def test_revision_reaches_tokenizer(make, monkeypatch):
    seen = []
    load = loading.AutoTokenizer.from_pretrained

    def noted(**options):
        seen.append(options["revision"])
        return load(**options)

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", noted)
    make(model_init_kwargs={"revision": "v2"})
    assert seen == ["v2"]
