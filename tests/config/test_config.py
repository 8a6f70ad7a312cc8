"""Config keys: types, ranges, and defaults < YAML < flags; each error names its key."""

import dataclasses
import re
import types
import typing

import pytest
import torch
import yaml

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config import (
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
)
from rlhf_pg.config.fields import Checked, bound, choice, number
from rlhf_pg.config.parse import REPLACED, dump, parse
from rlhf_pg.losses import POLICY_LOSSES

NAN = float("nan")
TRAINERS = [GRPOConfig, RLOOConfig, ReinforceConfig, PPOConfig]
CONFIGS = [*TRAINERS, SFTConfig, RewardModelConfig]
each_trainer = pytest.mark.parametrize("config", TRAINERS)
each_config = pytest.mark.parametrize("config", CONFIGS)

# key: (values just inside the range, values just outside it)
DATA = {
    "dataset_test_split": ([0.001, 0.999, "test", None], [0.0, 1.0, -0.1, NAN]),
}
LORA = {
    "lora_r": ([1], [0]),
    "lora_alpha": ([1e-3], [0.0, -1.0, NAN]),
    "lora_dropout": ([0.0, 0.999], [1.0, -0.1, NAN]),
}
RANGES = {
    "seed": ([0], [-1]),
    **DATA,
    "reward_workers": ([0, 1], [-1]),
    "reward_timeout": ([1e-3, None], [0.0, -1.0, NAN]),
    "reward_error_value": ([-1.0, 2.0], [NAN]),
    "prompts_per_step": ([1], [0]),
    "num_generations": ([2], [0, -1]),
    "num_iterations": ([1], [0]),
    "num_mini_batches": ([1], [0]),
    "micro_batch_tokens": ([1, "auto"], [0]),
    "rollout_cache_tokens": ([1, None], [0]),
    "max_completion_length": ([1], [0]),
    "max_turns": ([1, None], [0, -1]),
    "environment_timeout": ([1e-3], [0.0, -1.0, NAN]),
    "max_prompt_length": ([1, None], [0, -3]),
    "temperature": ([1e-3], [0.0, -1.0, NAN]),
    "top_k": ([0, 1], [-1]),
    "top_p": ([1e-3, 1.0], [0.0, 1.001, NAN]),
    "min_p": ([0.0, 1.0], [-1e-3, 1.001, NAN]),
    "epsilon": ([1e-3, 1.0], [0.0, 1.001, -0.2, NAN]),
    "epsilon_high": ([1e-3, 5.0, None], [0.0, -0.1, NAN]),
    "beta": ([0.0], [-1e-3, NAN]),
    "learning_rate": ([1e-12], [0.0, -1e-3, NAN]),
    "warmup_steps": ([0], [-1]),
    "weight_decay": ([0.0], [-1e-3, NAN]),
    "adam_beta1": ([0.0, 0.999], [1.0, -0.1, NAN]),
    "adam_beta2": ([0.0, 0.999], [1.0, -0.1, NAN]),
    "adam_epsilon": ([1e-12], [0.0, -1e-8, NAN]),
    "max_grad_norm": ([0.0], [-1e-3, NAN]),
    "max_steps": ([-1, 1], [0, -2]),
    "num_train_epochs": ([1e-3], [0.0, -1.0, NAN]),
    "ddp_timeout": ([1], [0, -1]),
    "max_skipped_steps": ([0], [-1]),
    "save_steps": ([0], [-1]),
    "logging_steps": ([1], [0, -1]),
    "save_total_limit": ([1, None], [0, -1]),
    "eval_steps": ([0], [-1]),
    "num_generations_eval": ([1], [0]),
    "eval_success_threshold": ([-1.0, 2.5], [NAN]),
    "log_completions_steps": ([0], [-1]),
    "num_completions_to_print": ([1], [0]),
    **LORA,
    "target_kl": ([1e-6, None], [0.0, -0.1, NAN]),
    "entropy_coef": ([0.0], [-1e-3, NAN]),
    "router_aux_loss_coef": ([0.0], [-1e-3, NAN]),
    "positive_nll_coef": ([0.0], [-1e-3, NAN]),
    "positive_nll_threshold": ([-1.0, 0.0], [NAN]),
    "missing_eos_penalty": ([0.0, None], [-1e-3, NAN]),
    "dynamic_sampling_rounds": ([0, 1], [-1]),
    "overlong_buffer": ([1, None], [0]),
    "overlong_penalty": ([1e-3], [0.0, -1.0, NAN]),
    "delta": ([1.3, None], [1.0, -0.1, NAN]),
    "sapo_temperature_pos": ([1e-3], [0.0, -1.0, NAN]),
    "sapo_temperature_neg": ([1e-3], [0.0, -1.0, NAN]),
    "old_kl_coef": ([0.0], [-1e-3, NAN]),
    "old_kl_target": ([1e-3, None], [0.0, -0.1, NAN]),
    "sampler_clip_max": ([1e-3], [0.0, -1.0, NAN]),
    "sampler_clip_min": ([1e-3, None], [0.0, -1.0, NAN]),
    "entropy_target": ([1e-3, None], [0.0, -1.0, NAN]),
    "entropy_coef_delta": ([1e-3], [0.0, -1.0, NAN]),
    "entropy_coef_min": ([0.0], [-1e-3, NAN]),
    "entropy_coef_max": ([0.0], [-1e-3, NAN]),
    "kl_target": ([1e-3], [0.0, -1.0, NAN]),
    "kl_horizon": ([1], [0]),
    "kl_adaptive_lr": ([1e-3, None], [0.0, -1.0, NAN]),
    "ref_model_sync_steps": ([1], [0]),
    "ref_model_mixup_alpha": ([1e-3, 1.0], [0.0, 1.001, NAN]),
    "vllm_gpu_memory_utilization": ([1e-3, 1.0], [0.0, 1.001, NAN]),
    "vllm_max_model_length": ([1, None], [0]),
    "vllm_server_timeout": ([1e-3], [0.0, -1.0, NAN]),
}
OF_ONE = {
    GRPOConfig: {"num_generations": ([2], [1]), "scale_rewards_eps": ([0.0], [-1e-3, NAN])},
    RLOOConfig: {"num_generations": ([2], [1])},
    ReinforceConfig: {"num_generations": ([1], [0]), "gamma": ([1e-3, 1.0], [0.0, 1.001, NAN])},
    PPOConfig: {
        "num_generations": ([1], [0]),
        "gamma": ([1e-3, 1.0], [0.0, 1.001, NAN]),
        "lam": ([0.0, 1.0], [-1e-3, 1.001, NAN]),
        "vf_coef": ([0.0], [-1e-3, NAN]),
        "cliprange_value": ([1e-3, None], [0.0, -0.1, NAN]),
        "value_learning_rate": ([1e-12, None], [0.0, -1e-3, NAN]),
        "lam_alpha": ([1e-3, None], [0.0, -1.0, NAN]),
        "value_lam": ([0.0, 1.0, None], [-1e-3, 1.001, NAN]),
        "n_steps": ([1, None], [0]),
        "value_pretraining_steps": ([0], [-1]),
        "value_iterations": ([0], [-1]),
    },
}
SUPERVISED = {
    **DATA,
    **LORA,
    "seed": ([0], [-1]),
    "max_steps": ([1, -1], [0, -2]),
    "num_train_epochs": ([0.1], [0.0, -1.0, NAN]),
    "max_length": ([1, None], [0]),
    "micro_batch_size": ([1, "auto"], [0]),
    "warmup_steps": ([0.0, 0.5], [-1.0, NAN]),
    "weight_decay": ([0.0], [-1.0, NAN]),
    "max_grad_norm": ([0.0], [-1.0, NAN]),
    "eval_steps": ([0], [-1]),
    "save_steps": ([0], [-1]),
    "save_total_limit": ([1, None], [0]),
    "logging_steps": ([1], [0]),
}
SFT = {
    **SUPERVISED,
    "label_smoothing": ([0.0, 0.999], [1.0, -0.1, NAN]),
    "batch_size": ([1], [0]),
    "learning_rate": ([1e-12], [0.0, -1.0, NAN]),
}
REWARD_MODEL = {
    **SUPERVISED,
    "batch_size": ([1], [0]),
    "center_rewards_coefficient": ([1e-3, None], [0.0, -1.0, NAN]),
    "learning_rate": ([1e-12], [0.0, -1.0, NAN]),
}
TABLES = [(config, table) for config in TRAINERS for table in (RANGES, OF_ONE[config])]
TABLES += [(SFTConfig, SFT), (RewardModelConfig, REWARD_MODEL)]


def cases(side):
    return [
        pytest.param(config, key, value, id=f"{config.__name__}-{key}={value}")
        for config, table in TABLES
        for key, limits in table.items()
        for value in limits[side]
    ]


def keys(config):
    return [field.name for field in dataclasses.fields(config)]


def read(config, path, text, *flags):
    path.write_text(text)
    return parse(config, ["--config", str(path), *flags])


def error_of(capsys, config, *args):
    """What `parse` prints as it refuses, without the frames and line breaks of the boxes."""
    with pytest.raises(SystemExit) as refusal:
        parse(config, list(args))
    assert refusal.value.code == 2
    out, err = capsys.readouterr()
    return re.sub(r"[\s│╭╮╰╯─]+", " ", out + err)


@pytest.fixture
def recipe(tmp_path):
    return tmp_path / "recipe.yaml"


# ---------------------------------------------------------------------------------------- ranges


@pytest.mark.fault(33, "refused by name when it is read")
@pytest.mark.parametrize(("config", "key", "value"), cases(1))
def test_out_of_range_number_raises_with_key(config, key, value):
    with pytest.raises(ValueError, match=rf"^{key} must be .*got {re.escape(str(value))}"):
        config(**{key: value})


@pytest.mark.parametrize(("config", "key", "value"), cases(0))
def test_number_at_range_edge_is_accepted(config, key, value):
    clipped = {"policy_loss": "clipped_surrogate"}
    twice = {"num_mini_batches": 2}
    moving = {"beta": 0.1, "kl_controller": "adaptive"}
    following = {"beta": 0.1, "sync_ref_model": True}
    corrected = {"sampler_correction": "token_mask"}
    bonus = {"entropy_target": 1.0}
    ignored = {"truncated_sampling": "ignore"}
    with_it = {
        "eval_success_threshold": {"num_generations_eval": 2},
        "reward_timeout": {"reward_workers": 1},
        "reward_error_value": {"on_reward_error": "value"},
        "top_k": ignored | {"top_p": 0.9},
        "top_p": ignored | {"top_k": 5},
        "min_p": ignored | {"top_k": 5},
        "delta": clipped,
        "overlong_penalty": {"overlong_buffer": 1},
        "dynamic_sampling_rounds": {"num_generations": 2},
        "sapo_temperature_pos": {"policy_loss": "sapo"},
        "sapo_temperature_neg": {"policy_loss": "sapo"},
        "old_kl_coef": {"policy_loss": "kl_penalty", **twice},
        "old_kl_target": {"policy_loss": "kl_penalty", **twice},
        "sampler_clip_max": corrected,
        "sampler_clip_min": corrected,
        "entropy_coef_delta": bonus,
        "entropy_coef_min": bonus,
        "entropy_coef_max": bonus,
        "kl_target": moving,
        "kl_horizon": moving | {"prompts_per_step": 1, "num_generations": 4},
        "positive_nll_threshold": {"positive_nll_coef": 0.1},
        "ref_model_sync_steps": following,
        "ref_model_mixup_alpha": following,
        "vllm_server_timeout": {"rollout_engine": "vllm_server"},
        "n_steps": {"advantage_estimator": "n_step"},
        "lam_alpha": {"advantage_estimator": "gae"},
        "epsilon": {"policy_loss": "clipped_surrogate"},
        "epsilon_high": {"policy_loss": "clipped_surrogate"},
        "prompts_per_step": {"num_generations": 2},
        "lora_r": {"use_peft": True},
        "lora_alpha": {"use_peft": True},
        "lora_dropout": {"use_peft": True, "disable_dropout": False},
        "target_kl": {"num_mini_batches": 2, "policy_loss": "clipped_surrogate"},
    }
    with_it["dataset_test_split"] = {"dataset_name": "org/data"}
    options = {key: value} | with_it.get(key, {})
    options = {name: option for name, option in options.items() if name in keys(config)}
    assert getattr(config(**options), key) == value


@each_config
def test_every_numeric_key_has_range_test(config):
    unions = (types.UnionType, typing.Union)  # of a Literal it is the latter
    numeric = {
        name
        for name, hint in typing.get_type_hints(config).items()
        if {int, float}
        & {hint, *(typing.get_args(hint) if typing.get_origin(hint) in unions else ())}
    }
    tried = {key for other, table in TABLES if other is config for key in table}
    assert numeric == tried & set(keys(config))


@pytest.mark.fault(33, "refused with the reason")
@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_group_of_one_raises_with_reason(config):
    with pytest.raises(ValueError, match=r"num_generations must be at least 2 \(.+ to compare\)"):
        config(num_generations=1)


def test_more_minibatches_than_prompts_raises():
    assert GRPOConfig(prompts_per_step=4, num_mini_batches=4).num_mini_batches == 4
    with pytest.raises(ValueError, match=r"num_mini_batches .*prompts_per_step \(4\)"):
        GRPOConfig(prompts_per_step=4, num_mini_batches=5)


@pytest.mark.parametrize("more", [{"num_iterations": 2}, {"num_mini_batches": 2}])
def test_vanilla_loss_with_several_updates_raises(more):
    assert ReinforceConfig().policy_loss == "vanilla"
    with pytest.raises(ValueError, match=r'policy_loss "vanilla".*"clipped_surrogate"'):
        ReinforceConfig(**more)
    assert ReinforceConfig(policy_loss="clipped_surrogate", **more).updates_per_step == 2


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (PPOConfig, {"importance_sampling_level": "sequence"}, "'gae' gives one per token"),
    ],
)
def test_unsuitable_advantages_for_sequence_loss_raise(config, options, said):
    with pytest.raises(ValueError, match=said):
        config(**options)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (
            RLOOConfig,
            {"kl_controller": "adaptive", "kl_horizon": 12},
            "than a fifth of the 64",
        ),
        (
            GRPOConfig,
            {"sampler_correction": "token_mask", "sampler_clip_min": 3.0},
            "sampler_clip_min must be below sampler_clip_max",
        ),
        (GRPOConfig, {"entropy_target": 1.0, "entropy_coef": 2.0}, "entropy_coef must be between"),
        (GRPOConfig, {"entropy_target": 1.0, "entropy_coef_min": 0.1}, "must be between"),
        (
            GRPOConfig,
            {
                "dynamic_sampling_rounds": 1,
                "advantage_estimator": "process_group_normalized",
            },
            "whose steps may differ",
        ),
        (RLOOConfig, {"kl_controller": "penalty", "kl_horizon": 5}, "kl_controller adaptive"),
        (
            PPOConfig,
            {"policy_loss": "kl_penalty", "old_kl_coef": 0.0, "old_kl_target": 0.1},
            "old_kl_target has no effect",
        ),
        (GRPOConfig, {"top_k": 50}, 'top_k 50 .* truncated_sampling to "ignore"'),
        (PPOConfig, {"top_p": 0.9}, "top_p 0.9 .* leave top_p out"),
        (RLOOConfig, {"min_p": 0.1}, "min_p 0.1 leaves tokens out"),
        (GRPOConfig, {"truncated_sampling": "ignore"}, "no effect without top_k, top_p"),
        (GRPOConfig, {"eval_success_threshold": 0.5}, "set num_generations_eval above 1"),
        (GRPOConfig, {"stop": ["a", ""]}, "stop must not hold an empty string"),
        (GRPOConfig, {"delta": 1.1}, "delta must be above"),
        (GRPOConfig, {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range must be"),
        (
            GRPOConfig,
            {"reward_squash": "min_max", "normalize_rewards": True},
            "both set the scale of a score",
        ),
        (GRPOConfig, {"beta": 0.1, "kl_estimator": "k1"}, "expected gradient of 0"),
        (RLOOConfig, {"kl_estimator": "k3_ratio"}, "is a form of the loss"),
        (GRPOConfig, {"sync_ref_model": True}, "no effect without beta"),
        (GRPOConfig, {"bfloat16_update": "nearest"}, "set dtype to bfloat16, or leave it out"),
        (GRPOConfig, {"dtype": "float64", "optim": "adamw_8bit"}, "updates no float64 weights"),
    ],
)
def test_harmful_option_combination_raises(config, options, said):
    with pytest.raises(ValueError, match=said):
        config(**options)


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({}, "none"),
        ({"rollout_engine": "native"}, "none"),
        ({"rollout_engine": "native", "sampler_correction": "token_mask"}, "token_mask"),
        ({"rollout_engine": "vllm", "sampler_clip_max": 2.0}, "token_truncate"),
        ({"rollout_engine": "vllm_server"}, "token_truncate"),
        ({"rollout_engine": "vllm", "sampler_correction": "none"}, "none"),
    ],
)
def test_off_policy_sampler_is_corrected_by_default(options, correction):
    args = GRPOConfig(**options)
    assert args.correction_of(args.rollout_engine) == correction


def test_std_eps_without_std_raises():
    with pytest.raises(ValueError, match="scale_rewards_eps is added to a std"):
        GRPOConfig(scale_rewards="none", scale_rewards_eps=1e-6)


def test_updates_per_step_are_passes_times_minibatches():
    assert GRPOConfig(num_iterations=3, num_mini_batches=2).updates_per_step == 6


# ----------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1.0),
        ("seed", "1"),
        ("seed", True),
        ("seed", None),
        ("beta", "0.1"),
        ("beta", True),
        ("beta", None),
        ("epsilon_high", "none"),
        ("disable_dropout", 1),
        ("disable_dropout", "true"),
        ("dtype", "float16"),
        ("dtype", torch.float32),
        ("aggregation", "mean"),
        ("kl_placement", True),
        ("kl_estimator", "k4"),
        ("scale_rewards", False),
        ("algorithm", "rloo"),
        ("output_dir", 3),
        ("output_dir", None),
        ("model_name_or_path", 3),
        ("reward_weights", 1.0),
        ("reward_weights", [1.0, "2"]),
        ("reward_weights", "12"),
        ("max_prompt_length", 1.5),
        ("advantage_estimator", 3),
        ("advantage_estimator", "nothing_like_it"),
        ("policy_loss", "ppo"),
        ("report_to", "neptune"),
        ("report_to", ["wandb", "neptune"]),
        ("run_name", 3),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("truncated_sampling", True),
    ],
)
def test_wrong_type_raises_with_key(key, value):
    with pytest.raises(ValueError, match=rf"^{key} must be .*got "):
        GRPOConfig(**{key: value})


def test_wrong_mapping_is_told_what_one_looks_like():
    with pytest.raises(ValueError, match=r'dataset_columns must be a mapping such as {"key": "val'):
        GRPOConfig(dataset_columns=["question"])


def test_ints_become_floats_and_lists_become_tuples():
    config = GRPOConfig(beta=1, reward_weights=[1, 2.5], num_train_epochs=3)
    assert (config.beta, config.num_train_epochs) == (1.0, 3.0)
    assert config.reward_weights == (1.0, 2.5)
    whole = (config.beta, config.num_train_epochs, *config.reward_weights)
    assert {type(x) for x in whole} == {float}


def test_misspelt_choice_error_lists_names_with_suggestion():
    with pytest.raises(ValueError, match="did you mean 'leave_one_out'") as refusal:
        GRPOConfig(advantage_estimator="leave_1_out")
    assert all(name in str(refusal.value) for name in ADVANTAGES)


def test_registered_estimator_is_selectable_by_name(monkeypatch, recipe):
    monkeypatch.setitem(ADVANTAGES, "mine", lambda signals: signals.rewards)
    monkeypatch.setitem(POLICY_LOSSES, "my_loss", lambda *args: (args[0], {}))
    assert GRPOConfig(advantage_estimator="mine").advantage_estimator == "mine"
    config = read(RLOOConfig, recipe, "advantage_estimator: mine\n", "--policy_loss", "my_loss")
    assert (config.advantage_estimator, config.policy_loss) == ("mine", "my_loss")


def test_function_is_bound_to_its_config_keys():
    def loss(logprobs, beta=0.3, *, epsilon_high=None, not_a_key=1):
        return logprobs, beta, epsilon_high, not_a_key

    config = GRPOConfig(beta=0.5, epsilon_high=0.4)
    assert bound(loss, config)("x") == ("x", 0.5, 0.4, 1)


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        ({"minimum": 2}, 2, 1, "at least 2"),
        ({"maximum": 2}, 2, 3, "at most 2"),
        ({"above": 2}, 3, 2, "above 2"),
        ({"below": 2}, 1, 2, "below 2"),
        ({"minimum": 0, "below": 2}, 0, 2, "below 2"),
        ({"minimum": 2, "because": "why not"}, 2, 1, r"at least 2 \(why not\)"),
    ],
)
def test_each_kind_of_limit(limits, inside, outside, words):
    made = dataclasses.make_dataclass(
        "Made", [("x", int, number(inside, **limits))], bases=(Checked,), kw_only=True
    )
    assert made().x == inside
    with pytest.raises(ValueError, match=f"^x must be {words}, got {outside}$"):
        made(x=outside)


def test_default_outside_range_or_registry_raises():
    for field in (number(0, minimum=1), choice("b", {"a": 1})):
        kind = int if field.default == 0 else str
        made = dataclasses.make_dataclass("Made", [("x", kind, field)], bases=(Checked,))
        with pytest.raises(ValueError, match=r"^x must be"):
            made()


# -------------------------------------------------------------------------------------- defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPOConfig, ("group_normalized", "clipped_surrogate", "token_mean", 0.0, "loss", "k3")),
        (RLOOConfig, ("leave_one_out", "clipped_surrogate", "constant", 0.05, "reward", "k1")),
        (ReinforceConfig, ("returns_minus_others", "vanilla", "constant", 0.05, "reward", "k1")),
        (PPOConfig, ("gae", "clipped_surrogate", "token_mean", 0.05, "reward", "k1")),
    ],
)
def test_defaults_match_algorithm(config, expected):
    c = parse(config, [])
    assert c == config()
    names = (c.advantage_estimator, c.policy_loss, c.aggregation)
    assert (*names, c.beta, c.kl_placement, c.kl_estimator) == expected


def test_more_defaults():
    assert GRPOConfig().scale_rewards == "group"
    assert ReinforceConfig().gamma == 1
    ppo = PPOConfig()
    assert (ppo.gamma, ppo.lam, ppo.normalize_advantages) == (1, 0.95, True)
    assert (ppo.vf_coef, ppo.cliprange_value, ppo.bootstrap_truncated) == (0.1, 0.2, False)
    assert all(config().temperature == 1 and config().disable_dropout for config in TRAINERS)


@each_config
def test_help_lists_every_key(capsys, config):
    with pytest.raises(SystemExit) as done:
        parse(config, ["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{key} " in text for key in ["config", *keys(config)])


def test_subclass_with_undocumented_key_is_parsed(capsys):
    @dataclasses.dataclass(kw_only=True)
    class Mine(GRPOConfig):
        own: int = 3

    assert parse(Mine, ["--own", "4"]).own == 4


def test_help_lists_names_of_registries(capsys):
    with pytest.raises(SystemExit):
        parse(GRPOConfig, ["--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {*ADVANTAGES, *POLICY_LOSSES} <= words


# ------------------------------------------------------------------------ defaults < YAML < flags


def test_flags_override_yaml_and_yaml_overrides_defaults(recipe):
    text = "learning_rate: 1e-5\nbeta: 0.5\nseed: 7\n"
    config = read(GRPOConfig, recipe, text, "--beta", "0.25", "--epsilon=0.1")
    assert (config.learning_rate, config.beta, config.seed) == (1e-5, 0.25, 7)
    assert (config.epsilon, config.temperature) == (0.1, 1.0)
    changed = {"learning_rate", "beta", "seed", "epsilon"}
    default = GRPOConfig()
    assert all(getattr(config, k) == getattr(default, k) for k in set(keys(config)) - changed)


OF_HUB = """
dataset_name: openai/gsm8k
dataset_config: main
dataset_train_split: train[:100]
dataset_columns: {prompt: question}
dataset_test_split: test
prompt_template: "{question}"
system_prompt: Be brief.
reward_funcs: [exact, format]
reward_options: {exact: {}}
reward_weights: [1, 2]
"""


@pytest.mark.parametrize(
    ("flag", "kept"),
    [
        (
            ("--dataset_name", "mine.jsonl"),
            {"dataset_columns": {"prompt": "question"}, "dataset_test_split": "test"},
        ),
        (
            ("--task", "reasoning_gym:gcd"),
            {"reward_weights": (1.0, 2.0), "system_prompt": "Be brief."},
        ),
        (("--reward_funcs", "length"), {"dataset_config": "main"}),
    ],
)
def test_flag_replaces_keys_of_what_it_replaces(recipe, flag, kept):
    config = read(GRPOConfig, recipe, OF_HUB, *flag)
    default = GRPOConfig()
    replaced = REPLACED[flag[0].removeprefix("--")]
    assert all(getattr(config, key) == getattr(default, key) for key in replaced)
    assert {key: getattr(config, key) for key in kept} == kept


def test_config_flag_may_be_anywhere(recipe):
    recipe.write_text("beta: 0.5\nseed: 7\n")
    config = parse(GRPOConfig, ["--beta", "0.25", f"--config={recipe}"])
    assert (config.beta, config.seed) == (0.25, 7)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # a string to PyYAML
        ("learning_rate: 1.0e-5", "learning_rate", 1e-5),
        ("beta: 1", "beta", 1.0),
        ("epsilon_high: null", "epsilon_high", None),
        ("epsilon_high: 0.3", "epsilon_high", 0.3),
        ("model_name_or_path: ~", "model_name_or_path", None),
        ("max_prompt_length: 64", "max_prompt_length", 64),
        ("max_steps: -1", "max_steps", -1),
        ("gradient_checkpointing: true", "gradient_checkpointing", True),
        ("gradient_checkpointing: offload", "gradient_checkpointing", "offload"),
        ("disable_dropout: false", "disable_dropout", False),
        ("reward_weights: [1, 0.5]", "reward_weights", (1.0, 0.5)),
        ("reward_weights: [-1.5]", "reward_weights", (-1.5,)),
        ("reward_weights: null", "reward_weights", None),
        ("output_dir: runs/a b", "output_dir", "runs/a b"),
        ("output_dir: '007'", "output_dir", "007"),
        ("scale_rewards: none", "scale_rewards", "none"),
        ("report_to: [tensorboard, wandb]", "report_to", ("tensorboard", "wandb")),
        ("report_to: trackio", "report_to", ("trackio",)),
        ("report_to: none", "report_to", ()),
        ("report_to: []", "report_to", ()),
        ("run_name: third try", "run_name", "third try"),
        ("stop: </answer>", "stop", ("</answer>",)),
        ('stop: ["\\n\\n", "User: "]', "stop", ("\n\n", "User: ")),
        ("stop: null", "stop", None),
        ('stop: ["--seed", "7"]', "stop", ("--seed", "7")),
        ("stop: [7]", "stop", ("7",)),
        ("run_name: 2026", "run_name", "2026"),
        ("run_name: --seed", "run_name", "--seed"),
        ("lora_target_modules: null", "lora_target_modules", None),
        ("reward_weights: 2", "reward_weights", (2.0,)),
    ],
)
def test_yaml_values_keep_their_type(recipe, line, key, value):
    result = getattr(read(GRPOConfig, recipe, line), key)
    assert result == value
    assert type(result) is type(value)


def test_flags_have_declared_type():
    args = "--epsilon_high None --reward_weights -1 2 --disable_dropout False --max_steps -1"
    config = parse(GRPOConfig, args.split())
    assert (config.epsilon_high, config.reward_weights) == (None, (-1.0, 2.0))
    assert (config.disable_dropout, config.max_steps) == (False, -1)
    trackers = parse(GRPOConfig, ["--report_to", "tensorboard", "wandb", "--run_name", "a"])
    assert (trackers.report_to, trackers.run_name) == (("tensorboard", "wandb"), "a")


@pytest.mark.parametrize("config_type", [GRPOConfig, SFTConfig, RewardModelConfig])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--gradient_checkpointing --seed 1", True),
        ("--gradient_checkpointing=false", False),
        ("--gradient_checkpointing offload", "offload"),
    ],
)
def test_checkpointing_is_a_switch_or_a_word(config_type, flags: str, expected) -> None:
    assert parse(config_type, flags.split()).gradient_checkpointing == expected


@pytest.mark.parametrize("given", [False, True, "offload"])
def test_offload_on_cpu_is_checkpointing(caplog, given) -> None:
    for config_type in (GRPOConfig, SFTConfig):
        args = config_type(gradient_checkpointing=given)
        assert args.on("cuda") is args
        assert args.on("cpu").gradient_checkpointing is bool(given)
    said = "gradient_checkpointing: offload is for GPUs; on a CPU it is as true"
    assert [r.getMessage() for r in caplog.records] == [said] * (2 * (given == "offload"))


def test_trackers_accept_one_name_none_or_duplicates():
    assert GRPOConfig(report_to="wandb").report_to == ("wandb",)
    assert GRPOConfig(report_to="none").report_to == ()
    assert GRPOConfig(report_to=["trackio", "wandb", "trackio"]).report_to == ("trackio", "wandb")


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.fault(32, "one error names key and file, and the nearest key")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("betta: 0.1", "unknown key 'betta' for GRPOConfig; did you mean 'beta'?"),
        ("num_generation: 4", "did you mean 'num_generations'?"),
        ("xyzzy: 1", "unknown key 'xyzzy' for GRPOConfig"),
        ("gamma: 0.9", "unknown key 'gamma' for GRPOConfig"),  # a key of another algorithm
        ("off: 1", "unknown key False"),
        ("seed: 1\nbeta: 0.1\nseed: 2", "'seed' stands twice"),
        ("beta: [1", "not valid YAML"),
        ("- beta", "expected `key: value` lines"),
        ("beta", "expected `key: value` lines"),
        ("seed: 1.5", "seed must be int, got 1.5"),
        ("seed: null", "seed must have a value, got null"),
        ("output_dir: null", "output_dir must have a value, got null"),
        ("beta: high", "beta must be float, got 'high'"),
        ("beta: -1", "beta must be at least 0, got -1.0"),
        ("beta: [1, 2]", "beta must be float, got [1, 2]"),
        ("num_mini_batches: 99", "num_mini_batches must be at most prompts_per_step (16)"),
        ("dtype: float16", "dtype must be one of 'float32'"),
        ("gradient_checkpointing: 3", "gradient_checkpointing must be bool or one of 'offload'"),
        ("reward_weights: [a]", "reward_weights must be float, got 'a'"),
        ("max_steps: {a: 1}", "max_steps must be int, got {'a': 1}"),
        ("policy_loss: clipped", "policy_loss must be one of"),
        ("report_to: [wandb, neptune]", "report_to must be one of 'none'"),
        ("algorithm: rloo", "algorithm must be one of 'grpo', got 'rloo'"),
        ('stop: ["--seed", 7, {a: 1}]', "stop must be str, got {'a': 1}"),
        ("a: &a {b: 1}\nc: {<<: *a}", "not valid YAML"),
        ("seed: 2026-02-30", "not valid YAML"),
    ],
)
def test_bad_recipe_is_one_error_with_key_and_file(capsys, tmp_path, recipe, text, said):
    recipe.write_text(text + "\n")
    error = error_of(capsys, GRPOConfig, "--config", str(recipe))
    assert said in error
    assert str(recipe) in re.sub(r" ", "", error)


def test_unrelated_bad_key_gets_no_suggestion(capsys, recipe):
    recipe.write_text("xyzzy: 1\n")
    assert "did you mean" not in error_of(capsys, GRPOConfig, "--config", str(recipe))


def test_binary_recipe_is_one_error(capsys, recipe):
    recipe.write_bytes(b"output_dir: \xff\n")
    assert "recipe.yaml: cannot be read" in error_of(capsys, GRPOConfig, "--config", str(recipe))


def test_missing_recipe_is_one_error(capsys, tmp_path):
    error = error_of(capsys, GRPOConfig, "--config", str(tmp_path / "no.yaml"))
    assert "no.yaml: cannot be read" in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--betta 0.1", "--beta"),
        ("--beta -1", "beta must be at least 0"),
        ("--seed 1.5", "--seed"),
        ("--dtype float16", "--dtype"),
        ("--algorithm rloo", "--algorithm"),
        ("--advantage_estimator leave_1_out", "did you mean 'leave_one_out'"),
        ("--conf recipe", "--conf"),
        ("surplus", "surplus"),
    ],
)
def test_bad_flag_is_one_error_with_name(capsys, flags, said):
    error = error_of(capsys, GRPOConfig, *flags.split())
    assert said in error
    assert ".yaml" not in error


@pytest.mark.parametrize(("config", "other"), [(a, b) for a in CONFIGS for b in CONFIGS if a != b])
def test_recipe_of_other_algorithm_is_rejected(capsys, recipe, config, other):
    recipe.write_text(f"algorithm: {other().algorithm}\n")
    assert "algorithm must be" in error_of(capsys, config, "--config", str(recipe))
    recipe.write_text(f"algorithm: {config().algorithm}\n")
    assert parse(config, ["--config", str(recipe)]) == config()


def test_value_may_equal_foreign_key():
    assert parse(GRPOConfig, ["--output_dir", "bf16"]).output_dir == "bf16"


@pytest.mark.parametrize(
    "text",
    [
        "xyzzy: 1",
        "use_vllm: true",
        "dtype: float16",
        "seed: 1.5",
        "beta: -1",
    ],
)
def test_only_first_rank_prints_error(capsys, monkeypatch, recipe, text):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as refusal:
        read(GRPOConfig, recipe, text)
    assert refusal.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_rank_without_launcher_prints_error(capsys, monkeypatch, recipe):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        read(GRPOConfig, recipe, "beta: -1")
    assert "beta must be at least 0" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- dump


OTHER_DATA = {
    "dataset_name": ("org/data", "org/more"),
    "dataset_config": "main",
    "dataset_train_split": "train[:9]",
    "dataset_test_split": 0.1,
    "dataset_weights": (1.0, 2.0),
    "dataset_columns": {"prompt": "question: no", "answer": "a # b"},
    "prompt_template": "Q: {question}\n",
    "system_prompt": "Be --brief",
    "apply_chat_template": True,
    "chat_template_kwargs": {"enable_thinking": False, "n": 1},
    "dataset_fingerprint": "00ff",
}
OTHER_ADAPTER = {
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 9.0,
    "lora_target_modules": ("q_proj",),
    "load_in_4bit": True,
    "save_merged": True,
}
DATA_APART = [
    {
        "task": "guess",
        "attn_implementation": "eager",
        "model_init_kwargs": {"revision": "v1", "rope_theta": 1e6},
    },
    {"task": "reasoning_gym:chain_sum", "task_options": {"min_terms": 2}},
    {"dataset_name": "org/data", "eval_dataset_name": "org/other"},
]
OTHER_VALUES = {
    "reward_model_sees_eos": False,
    "model_name_or_path": "org/model-0.5B",
    **OTHER_DATA,
    "reward_workers": 2,
    "reward_timeout": 2.5,
    "on_reward_error": "value",
    "reward_error_value": -0.5,
    "reward_funcs": ("math", "length"),
    "reward_options": {"length": {"target": 9, "words": ["a: b", "--c"]}},
    "reward_model_name_or_path": "org/judge-0.5B",
    "output_dir": "runs/a: b # c",
    "given_in_python": ("tools", "optimizers"),
    "resume_from_checkpoint": "latest",
    "seed": 7,
    "dtype": "bfloat16",
    "bfloat16_update": "nearest",
    "optim": "adamw_8bit",
    "disable_dropout": False,
    "gradient_checkpointing": True,
    "pad_token": "<|pad|>",
    "shuffle_dataset": False,
    "max_prompt_length": 99,
    "long_prompts": "drop",
    "prompts_per_step": 5,
    "num_generations": 3,
    "num_iterations": 2,
    "num_mini_batches": 4,
    "micro_batch_tokens": 1000,
    "rollout_cache_tokens": 999,
    "max_completion_length": 33,
    "max_turns": 6,
    "environment_timeout": 1.5,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "truncated_sampling": "ignore",
    "stop": ("\n", "a: b # c"),
    "advantage_estimator": "returns",
    "policy_loss": "clipped_surrogate",
    "aggregation": "sequence_mean",
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "beta": 1e-3,
    "kl_placement": "reward",
    "kl_estimator": "k2",
    "reward_weights": (1.0, -0.5, 1e-7),
    "learning_rate": 1 / 3 * 1e-5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "weight_decay": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-5,
    "max_grad_norm": 0.0,
    "max_steps": 11,
    "num_train_epochs": 2.5,
    "ddp_timeout": 60,
    "max_skipped_steps": 5,
    "trust_remote_code": True,
    "save_steps": 1,
    "eval_steps": 2,
    "num_generations_eval": 6,
    "eval_success_threshold": 0.5,
    "log_completions_steps": 3,
    "num_completions_to_print": 4,
    "use_peft": True,
    "lora_r": 3,
    "lora_alpha": 5.0,
    "lora_dropout": 0.1,
    "lora_target_modules": ("q_proj", "v_proj"),
    "load_in_4bit": True,
    "save_merged": True,
    "target_kl": 0.02,
    "entropy_coef": 0.01,
    "positive_nll_coef": 0.1,
    "positive_nll_threshold": 0.0,
    "normalize_advantages": True,
    "missing_eos_penalty": 1.0,
    "missing_eos_mode": "replace",
    "overlong_buffer": 3,
    "overlong_penalty": 2.0,
    "reward_clip_range": (-1.0, 2.5),
    "normalize_rewards": True,
    "dynamic_sampling_rounds": 2,
    "mask_truncated_completions": True,
    "delta": 4.0,
    "sampler_correction": "sequence_mask",
    "sampler_clip_max": 2.0,
    "sampler_clip_min": 0.5,
    "entropy_target": 0.3,
    "entropy_coef_delta": 0.1,
    "entropy_coef_min": 0.01,
    "entropy_coef_max": 0.2,
    "kl_controller": "adaptive",
    "kl_target": 3.0,
    "kl_horizon": 500,
    "kl_adaptive_lr": 0.01,
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "ref_model_mixup_alpha": 0.5,
    "save_best": False,
    "logging_steps": 5,
    "save_total_limit": 3,
    "report_to": ("tensorboard", "trackio"),
    "run_name": "third: try",
}
OTHER_SUPERVISED = {
    "resume_from_checkpoint": "latest",
    "dtype": "bfloat16",
    "disable_dropout": False,
    "gradient_checkpointing": "offload",
    "pad_token": "<pad>",
    "max_length": 99,
    "append_eos": False,
    "num_train_epochs": 2.5,
    "micro_batch_size": 2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0.3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "eval_steps": 7,
    "save_steps": 8,
    "save_total_limit": None,
    "logging_steps": 9,
    "report_to": ("tensorboard", "trackio"),
    "run_name": "third: try",
}
REFUSED_BY_REWARD_MODEL = {"load_in_4bit", "save_merged"}
OTHERS = {
    GRPOConfig: OTHER_VALUES | {"scale_rewards": "none", "advantage_estimator": "group_normalized"},
    RLOOConfig: OTHER_VALUES | {"kl_placement": "loss"},
    ReinforceConfig: OTHER_VALUES | {"gamma": 0.99, "kl_placement": "loss"},
    PPOConfig: OTHER_VALUES
    | {
        "advantage_estimator": "gae",
        "kl_placement": "loss",
        "normalize_advantages": False,
        "gamma": 0.99,
        "lam": 0.9,
        "value_lam": 1.0,
        "bootstrap_truncated": True,
        "value_model_name_or_path": "org/reward-model",
        "value_pretraining_steps": 5,
        "value_iterations": 2,
        "normalize_values": True,
        "value_learning_rate": 1e-4,
        "vf_coef": 0.5,
        "cliprange_value": None,
    },
    SFTConfig: OTHER_DATA
    | OTHER_ADAPTER
    | OTHER_SUPERVISED
    | {
        "completion_only_loss": True,
        "assistant_only_loss": True,
        "long_examples": "truncate",
        "packing": True,
        "model_name_or_path": "org/model-0.5B",
        "trust_remote_code": True,
        "lora_dropout": 0.1,
        "output_dir": "x",
        "seed": 1,
        "max_steps": 3,
        "label_smoothing": 0.1,
        "batch_size": 2,
        "learning_rate": 1e-5,
    },
    RewardModelConfig: OTHER_DATA
    | {key: value for key, value in OTHER_ADAPTER.items() if key not in REFUSED_BY_REWARD_MODEL}
    | OTHER_SUPERVISED
    | {
        "long_examples": "drop",
        "center_rewards_coefficient": 0.01,
        "model_name_or_path": "org/model-0.5B",
        "lora_dropout": 0.1,
        "output_dir": "x",
        "seed": 1,
        "max_steps": 3,
        "batch_size": 2,
        "trust_remote_code": True,
        "learning_rate": 1e-3,
    },
}

# What does not go together with the values above.
APART = [
    *DATA_APART,
    {"push_to_hub": True, "hub_model_id": "me/model", "hub_private_repo": True},
    {"reward_squash": "sigmoid"},
    {"router_aux_loss_coef": 0.01},
    {
        "rollout_engine": "vllm",
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": 99,
    },
    {
        "rollout_engine": "vllm_server",
        "vllm_server_base_url": "https://there:1",
        "vllm_server_timeout": 9.0,
        "vllm_sync_directory": "/dev/shm/x",
    },
    {"policy_loss": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    {"policy_loss": "kl_penalty", "old_kl_coef": 2.0, "old_kl_target": 0.1, "num_iterations": 2},
]
BY_RETURNS = {
    "advantage_estimator": "returns",
    "whiten_rewards": True,
}

OF_ROWS = {
    "importance_sampling_level": "sequence",
    "policy_loss": "clipped_surrogate",
    "advantage_estimator": "leave_one_out",
    "num_generations": 4,
}
APART_IN = {
    GRPOConfig: [*APART, BY_RETURNS, OF_ROWS, {"scale_rewards_eps": 1e-6}],
    PPOConfig: [
        *APART,
        {"lam_alpha": 0.5},
        {"advantage_estimator": "n_step", "n_steps": 3, "whiten_rewards": True},
        {"value_init": "random", "critic": "separate"},
    ],
    SFTConfig: [*DATA_APART[:-1], DATA_APART[-1] | {"max_steps": 9}],
    RewardModelConfig: [
        *DATA_APART[:-1],
        {"dataset_name": "org/data", "eval_dataset_name": "org/other"},
    ],
}


def apart(config):
    return APART_IN.get(config, [*APART, BY_RETURNS, OF_ROWS])


@pytest.mark.parametrize("url", ["http://me:S3CRET@a", "http://a?key=S3CRET", "http://a/#S3CRET"])
def test_secret_in_server_address_is_rejected_and_hidden(url):
    with pytest.raises(ValueError, match="vllm_server_base_url holds") as error:
        GRPOConfig(rollout_engine="vllm_server", vllm_server_base_url=url)
    assert "S3CRET" not in str(error.value)


@each_config
def test_dumped_config_parses_back_to_itself(config, tmp_path):
    options = [{}, OTHERS[config], *apart(config)]
    for original in (config(**values) for values in options):
        dump(original, tmp_path / "config.yaml")
        assert parse(config, ["--config", str(tmp_path / "config.yaml")]) == original


@each_config
def test_dump_test_covers_every_variable_key(config):
    default, others = dataclasses.asdict(config()), OTHERS[config]
    with_one_value = {"algorithm", "critic"}
    with_one_value |= {"importance_sampling_level"}  # for PPO
    if config is RewardModelConfig:
        with_one_value |= REFUSED_BY_REWARD_MODEL
    tried = set(others).union(*apart(config))
    assert set(default) - tried <= with_one_value
    assert {key for key in others if others[key] == default[key]} <= {
        "policy_loss",
        "advantage_estimator",
    }


@each_trainer
def test_dump_is_plain_yaml_of_every_key(config, tmp_path):
    dump(config(reward_weights=(1.0, 2.0)), tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert list(values) == keys(config)
    assert values["reward_weights"] == [1.0, 2.0]
    assert values["epsilon_high"] is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_number_raises(value):
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        GRPOConfig(temperature=value)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('run_name: "a\\e[2J\\0\\u202eb"', ["--help"]),
        ('stop: ["\\e[2J"]', ["--help"]),
        ('run_name: "\\e[2J"', ["--run_name"]),
        ('run_name: "\\e[2J"', ["--nothing", "1"]),
        ('run_name: "\\e[2J"\nseed: x', []),
        ('"\\e[2J": 5', []),
        ('"\\e[2J": 5\n"\\e[2J": 6', []),
        ("!\u202e [", []),
        ("", ["--dtype", "\x1b[2J"]),
        ("", ["--\x1b[2J", "5"]),
    ],
)
def test_printed_values_are_escaped_for_terminal(capsys, recipe, text, flags):
    recipe.write_text(f"{text}\nalgorithm: grpo\n")
    with pytest.raises(SystemExit):
        parse(GRPOConfig, ["--config", str(recipe), *flags])
    said = "".join(capsys.readouterr())
    assert said
    assert not [letter for letter in said if not letter.isprintable() and letter != "\n"]


def test_value_with_newline_is_kept():
    assert parse(GRPOConfig, ["--stop", "\n", "\x1b"]).stop == ("\n", "\x1b")


def test_value_starting_with_dash_is_no_flag(recipe):
    recipe.write_text("output_dir: -x\n")
    assert parse(GRPOConfig, ["--config", str(recipe)]).output_dir == "-x"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (ReinforceConfig, {"advantage_estimator": "leave_one_out"}, "raise num_generations"),
        (ReinforceConfig, {"prompts_per_step": 1}, "raise num_generations"),
        (
            ReinforceConfig,
            {"advantage_estimator": "leave_one_out", "num_generations": 2, "gamma": 0.5},
            "gamma is not used by advantage_estimator 'leave_one_out'",
        ),
        (
            GRPOConfig,
            {"advantage_estimator": "leave_one_out", "scale_rewards": "none"},
            "scale_rewards is not used by advantage_estimator 'leave_one_out'",
        ),
        (ReinforceConfig, {"epsilon": 0.1}, "epsilon is not used by policy_loss 'vanilla'"),
        (
            GRPOConfig,
            {"kl_placement": "loss", "kl_estimator": "k1", "beta": 0.1},
            "expected gradient of 0",
        ),
        (GRPOConfig, {"advantage_estimator": "gae"}, "'gae' needs a critic"),
        (PPOConfig, {"advantage_estimator": "leave_one_out"}, "no use of the critic.*choose gae"),
        (
            PPOConfig,
            {"critic": "shared", "value_model_name_or_path": "x"},
            "value_model_name_or_path is for a separate critic",
        ),
        (GRPOConfig, {"target_kl": 0.1}, "raise num_iterations or num_mini_batches"),
        (GRPOConfig, {"lora_r": 8}, "lora_r is for LoRA: set use_peft"),
        (
            GRPOConfig,
            {"rollout_engine": "native", "vllm_max_model_length": 9},
            "no effect without rollout_engine vllm:",
        ),
        (GRPOConfig, {"sampler_clip_max": 9.0}, "no effect without sampler_correction"),
        (
            GRPOConfig,
            {"rollout_engine": "vllm", "sampler_correction": "none", "sampler_clip_max": 9.0},
            "no effect without sampler_correction",
        ),
        (GRPOConfig, {"vllm_server_timeout": 9.0}, "no effect without rollout_engine vllm_server"),
        (
            GRPOConfig,
            {"rollout_engine": "vllm", "rollout_cache_tokens": 9},
            "rollout_cache_tokens has no effect without rollout_engine native",
        ),
        (
            GRPOConfig,
            {"rollout_engine": "vllm", "vllm_server_timeout": 9.0},
            "vllm_server_timeout has no effect without rollout_engine vllm_server",
        ),
        (
            GRPOConfig,
            {"rollout_engine": "vllm_server", "vllm_server_base_url": "localhost:8000"},
            "vllm_server_base_url must begin with http:// or https://, got 'localhost:8000'",
        ),
        (
            GRPOConfig,
            {"rollout_engine": "vllm_server", "vllm_server_base_url": "http://there:99999"},
            "vllm_server_base_url must be http://host or .*, got 'http://there:99999'",
        ),
        (GRPOConfig, {"lora_target_modules": ["q_proj"]}, "lora_target_modules is for LoRA"),
        (GRPOConfig, {"use_peft": True, "lora_dropout": 0.1}, "needs disable_dropout: false"),
        (
            GRPOConfig,
            {"router_aux_loss_coef": 0.1, "disable_dropout": False},
            "^router_aux_loss_coef .* with disable_dropout false draws other dropout",
        ),
        (GRPOConfig, {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be"),
    ],
)
def test_useless_or_ignored_option_raises(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_unavailable_flag_error_points_to_alternative(capsys):
    assert "metrics.jsonl" in error_of(capsys, GRPOConfig, "--logging_strategy", "1")
