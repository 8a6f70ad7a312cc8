"""Keys and arguments of TRL, transformers and other libraries: each says what to use here."""

import dataclasses
import inspect
import re
import warnings

import pytest
import transformers

from rlhf_pg import GRPOTrainer, PPOTrainer, RLOOTrainer
from rlhf_pg.config import (
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
)
from rlhf_pg.config.foreign_keys import ANYWHERE, FOREIGN_KEYS, NO_MEANING, explained
from rlhf_pg.config.parse import parse
from rlhf_pg.config.supervised_keys import SUPERVISED_KEYS, SUPERVISED_NO_MEANING
from rlhf_pg.config.transformers_keys import TRANSFORMERS_KEYS, TRANSFORMERS_NO_MEANING
from rlhf_pg.config.trl_keys import TRAINER_ARGUMENTS, TRL_KEYS, TRL_NO_MEANING

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl

TRAINERS = [GRPOConfig, RLOOConfig, ReinforceConfig, PPOConfig]
SUPERVISED = [SFTConfig, RewardModelConfig]
THEIRS = {
    "TrainingArguments": (transformers.TrainingArguments, GRPOConfig),
    "GRPO": (trl.GRPOConfig, GRPOConfig),
    "RLOO": (trl.RLOOConfig, RLOOConfig),
    "SFT": (trl.SFTConfig, SFTConfig),
    "reward model": (trl.RewardConfig, RewardModelConfig),
    "ModelConfig": (trl.ModelConfig, GRPOConfig),
    "ScriptArguments": (trl.ScriptArguments, GRPOConfig),
}


def keys(config) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def error_of(capsys, config, *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(config, list(args))
    assert caught.value.code == 2
    return re.sub(r"[\s│]+", " ", capsys.readouterr().err)


@pytest.mark.parametrize("name", THEIRS)
def test_every_field_of_their_configs_is_known(name):
    theirs, ours = THEIRS[name]
    fields = keys(theirs) - keys(ours)
    if ours in TRAINERS:  # what is no key of this config, but is one of the others with rollouts
        fields -= set().union(*map(keys, TRAINERS))
    assert [key for key in sorted(fields) if explained(key, keys(ours)) is None] == []


@pytest.mark.parametrize(("key", "value"), [(name, 1) for name in [*FOREIGN_KEYS, *NO_MEANING]])
def test_foreign_key_error_says_what_to_use(capsys, tmp_path, key, value):
    said = explained(key)
    assert FOREIGN_KEYS.get(key, NO_MEANING.get(key)) in said
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: {value}\n")
    told = re.sub(r"\s+", " ", said)
    assert f"{recipe}: {told}" in error_of(capsys, GRPOConfig, "--config", str(recipe))
    for flags in ([f"--{key}", "1"], [f"--{key.replace('_', '-')}=1"]):
        assert f"command line: {told}" in error_of(capsys, GRPOConfig, *flags)
    with pytest.raises(TypeError, match=f"^{re.escape(f'GRPOConfig: {said}')}$"):
        GRPOConfig(**{key: value})


@pytest.mark.parametrize("config", TRAINERS)
def test_rejected_names_are_not_config_keys(config):
    assert not {*FOREIGN_KEYS, *NO_MEANING} & keys(config)


@pytest.mark.parametrize("config", [*TRAINERS, *SUPERVISED])
def test_explanation_names_no_key_that_the_config_lacks(config):
    """Except one that is said to be of another config, as in "lam, of PPO"."""
    lacking = set().union(*map(keys, [*TRAINERS, *SUPERVISED])) - keys(config)
    for key in {*FOREIGN_KEYS, *NO_MEANING, *SUPERVISED_KEYS, *SUPERVISED_NO_MEANING}:
        said = explained(key, keys(config)) or ""
        named = said.replace(f"{key!r}", "").replace(f"`{key}`", "")
        assert not lacking & {*re.findall(r"\w+(?!\w|, of [A-Z])", named)}, (key, said)


def test_hint_names_a_key_or_another_place():
    ours = set().union(*map(keys, [*TRAINERS, *SUPERVISED]))
    for hint in FOREIGN_KEYS.values():
        assert re.match(r"\w+", hint)[0] in ours | ANYWHERE | {"metrics", "rlhf"}, hint


def test_every_key_is_explained_once():
    assert not {*SUPERVISED_KEYS, *SUPERVISED_NO_MEANING} & (
        keys(SFTConfig) & keys(RewardModelConfig)
    )
    tables = [TRANSFORMERS_KEYS, TRANSFORMERS_NO_MEANING, TRL_KEYS, TRL_NO_MEANING]
    names = [key for table in tables for key in table]
    assert len(names) == len(set(names))
    assert not set(FOREIGN_KEYS) & set(NO_MEANING)


@pytest.mark.parametrize("config", [*TRAINERS, *SUPERVISED])
def test_unknown_keyword_raises_with_hint(config):
    sizes = "prompts_per_step" if config in TRAINERS else "batch_size, over all processes"
    for key, said in {
        "per_device_train_batch_size": f"see {sizes}",
        "rnn": "`rnn` has no meaning here: a transformer remembers",
        "learning_rat": "unknown key 'learning_rat'; did you mean 'learning_rate'?",
        "zzz": "unknown key 'zzz'",
    }.items():
        with pytest.raises(TypeError, match=f"^{config.__name__}: .*{re.escape(said)}"):
            config(**{key: 1})


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (SFTConfig, "max_seq_length", "see max_length"),
        (SFTConfig, "padding_free", "see packing"),
        (RewardModelConfig, "padding_free", "no meaning here: texts are padded"),
        (RewardModelConfig, "per_device_eval_batch_size", "see micro_batch_size"),
        (RewardModelConfig, "optim", "no meaning here: the optimizer is AdamW"),
        (SFTConfig, "load_best_model_at_end", "no meaning here: final/ is"),
        (SFTConfig, "use_vllm", "no meaning here: it is for runs with rewards"),
        (SFTConfig, "bf16", "see dtype: bfloat16"),
    ],
)
def test_supervised_run_has_hints_of_its_own(config, key, said):
    with pytest.raises(TypeError, match=f"^{config.__name__}: .{key}.* {said}"):
        config(**{key: 1})


def test_key_of_other_kind_of_run_is_no_foreign_key_there():
    assert parse(SFTConfig, ["--batch_size", "4"]).batch_size == 4
    with pytest.raises(TypeError, match="see prompts_per_step, num_generations"):
        GRPOConfig(batch_size=4)


def test_positional_key_raises_with_name():
    with pytest.raises(TypeError, match=r"GRPOConfig: give every key by its name, .*'runs/a'"):
        GRPOConfig("runs/a")


# ------------------------------------------------------------------------- arguments of trainers

ARGUMENTS = {
    "GRPO": (trl.GRPOTrainer, GRPOTrainer),
    "RLOO": (trl.RLOOTrainer, RLOOTrainer),
    "SFT": (trl.SFTTrainer, GRPOTrainer),
    "reward model": (trl.RewardTrainer, GRPOTrainer),
    "Trainer": (transformers.Trainer, GRPOTrainer),
}
LATER = {"rollout_func"}  # taken from where episodes are


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_of_their_trainers_is_known(name):
    theirs, ours = ARGUMENTS[name]
    for argument in [*inspect.signature(theirs.__init__).parameters][1:]:
        if argument not in inspect.signature(ours.__init__).parameters and argument not in LATER:
            with pytest.raises(TypeError, match=f"^{ours.__name__}: '{argument}' is "):
                ours(**{argument: None})


@pytest.mark.parametrize("name", TRAINER_ARGUMENTS)
def test_foreign_argument_says_what_to_use(name):
    if name != "value_model":
        with pytest.raises(TypeError) as caught:
            PPOTrainer(**{name: None})
        assert str(caught.value) == f"PPOTrainer: {name!r} {TRAINER_ARGUMENTS[name]}"


def test_old_ppo_trainer_is_one_error():
    with pytest.raises(TypeError) as caught:
        PPOTrainer(config=1, model="m", ref_model=2, reward_model=3, value_model=4, tokenizer=5)
    said = str(caught.value)
    for name in ("config", "ref_model", "reward_model", "tokenizer"):
        assert f"{name!r} {TRAINER_ARGUMENTS[name]}" in said
    assert "value_model" not in said


def test_key_given_to_trainer_points_to_config():
    with pytest.raises(TypeError, match="'learning_rate' is a key of the config: args=RLOOConfig"):
        RLOOTrainer(learning_rate=1e-3)
    with pytest.raises(TypeError, match="'critic_learning_rate' is not a key here; see value_lear"):
        PPOTrainer(critic_learning_rate=1e-3)
    with pytest.raises(TypeError, match="value_model' is of PPOTrainer"):
        GRPOTrainer(value_model=1)


def test_their_config_as_args_names_its_module(tmp_path):
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=r"args must be rlhf_pg's GRPOConfig, got trl\.trainer"):
        GRPOTrainer(model="m", args=theirs)
