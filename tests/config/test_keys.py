"""Every key says all of itself where it is declared."""

import inspect

import pytest

from rlhf_pg.config import PPOConfig, fields
from rlhf_pg.config.fields import EFFECTS, metadata
from rlhf_pg.config.foreign_keys import configs
from rlhf_pg.config.parse import parse
from rlhf_pg.config.rules import is_met
from rlhf_pg.config.run import TrainingConfig, effect_of

OURS = [kind for kind in configs(TrainingConfig) if kind.__module__.startswith("rlhf_pg.")]
# What a resumed run may change, and replay may not: a row of each kind of key.
PERMISSIONS = {
    "output_dir": ("free", "none"),
    "eval_steps": ("free", "none"),
    "micro_batch_tokens": ("free", "computed"),
    "max_steps": ("warned", "computed"),
    "reward_funcs": ("warned", "computed"),
    "beta": ("fixed", "computed"),
    "system_prompt": ("free", "other run"),
    "prompt_template": ("free", "other run"),
    "max_turns": ("fixed", "other run"),
    "load_in_4bit": ("fixed", "other run"),
    "a key of another's trainer": ("fixed", "computed"),
}


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_key_says_whether_resume_and_replay_may_change_it(kind) -> None:
    unsaid = [key for key, words in metadata(kind).items() if words.get("effect") not in EFFECTS]
    assert unsaid == []


def test_key_has_one_effect_in_all_configs() -> None:
    effects = {(key, words["effect"]) for kind in OURS for key, words in metadata(kind).items()}
    assert len(effects) == len({key for key, _ in effects})


@pytest.mark.parametrize(("key", "permissions"), PERMISSIONS.items())
def test_permissions(key, permissions) -> None:
    assert EFFECTS[effect_of(key)] == permissions


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_what_a_key_names_is_a_key(kind) -> None:
    keys = metadata(kind)
    for words in keys.values():
        for need in filter(None, words.get("needs", "").split(" and ")):
            assert need.split()[0] in keys
        assert set(words.get("replaced_by", "").split()) <= keys.keys() | {"reward_funcs"}


NEEDS = [
    ({}, "use_peft", False),
    ({"use_peft": True}, "use_peft", True),
    ({"beta": 0.0}, "beta", False),
    ({"missing_eos_penalty": 0.0}, "missing_eos_penalty", True),
    ({}, "lam_alpha none", True),
    ({"lam_alpha": 0.1}, "lam_alpha none", False),
    ({}, "rollout_engine auto or native", True),
    ({"rollout_engine": "vllm"}, "rollout_engine auto or native", False),
    ({"rollout_workers": 2}, "rollout_workers or rollout_engine vllm_server", True),
    ({"rollout_engine": "vllm_server"}, "rollout_workers or rollout_engine vllm_server", True),
    ({}, "rollout_workers or rollout_engine vllm_server", False),
    ({"num_generations_eval": 2}, "num_generations_eval above 1", True),
    ({}, "num_generations_eval above 1", False),
    ({}, "sampler_correction", False),
    ({"rollout_engine": "vllm"}, "sampler_correction", True),
    ({}, "old_kl_coef", False),
    ({"policy_loss": "kl_penalty"}, "old_kl_coef", True),
    ({}, "agent_program", True),  # it may be given in Python
]


@pytest.mark.parametrize(("values", "need", "met"), NEEDS)
def test_need_is_met(values, need, met) -> None:
    assert is_met(PPOConfig(**values), need) == met


def test_help_says_what_a_key_needs(capsys) -> None:
    with pytest.raises(SystemExit):
        parse(PPOConfig, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Rank of the LoRA adapter. Needs use_peft." in text


def test_key_of_a_subclass_has_what_it_does_not_say_from_the_key_that_it_overrides() -> None:
    @fields.config
    class Mine(PPOConfig):
        beta: float = 0.2
        lora_r: int = fields.option(8, help="Another help.")

    words = metadata(Mine)
    assert words["beta"]["effect"] == "update"
    assert words["lora_r"]["help"] == "Another help."
    assert words["lora_r"]["needs"] == "use_peft"
    assert Mine(use_peft=True).lora_r == 8
    assert inspect.signature(Mine).parameters.keys() >= {"beta", "lora_r"}
