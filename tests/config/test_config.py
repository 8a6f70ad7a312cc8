"""Config keys: types, ranges, and defaults < YAML < flags; each error names its key."""

import dataclasses
import re

import pytest
import yaml

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config import (
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
    config,
)
from rlhf_pg.config.fields import bound
from rlhf_pg.config.parse import REPLACED, dump, parse
from rlhf_pg.losses import POLICY_LOSSES

NAN = float("nan")
TRAINERS = [GRPOConfig, RLOOConfig, ReinforceConfig, PPOConfig]
CONFIGS = [*TRAINERS, SFTConfig, RewardModelConfig]
each_trainer = pytest.mark.parametrize("config", TRAINERS)
each_config = pytest.mark.parametrize("config", CONFIGS)


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
@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GRPOConfig, "num_generations", 1),
        (RLOOConfig, "num_generations", 1),
        (GRPOConfig, "temperature", 0),
        (GRPOConfig, "temperature", float("nan")),
        (GRPOConfig, "temperature", float("inf")),
        (GRPOConfig, "epsilon", 1.5),
        (GRPOConfig, "lora_dropout", 1),
        (GRPOConfig, "max_grad_norm", -1),
        (PPOConfig, "lam", 1.01),
        (PPOConfig, "beta", -0.1),
        (SFTConfig, "label_smoothing", 1.0),
        (SFTConfig, "micro_batch_size", 0),
    ],
)
def test_number_out_of_range_is_refused(config, key, value):
    with pytest.raises(ValueError, match=rf"^{key} must be .*, got "):
        config(**{key: value})


def test_everything_wrong_is_told_at_once():
    """21 keys as a user of TRL writes them, seven of them not ours or wrong: a line for each."""
    right = {
        "model_name_or_path": "m",
        "output_dir": "o",
        "learning_rate": 1e-6,
        "seed": 1,
        "num_generations": 8,
        "max_completion_length": 64,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "max_steps": 10,
        "save_steps": 5,
        "logging_steps": 1.0,
        "report_to": "none",
        "warmup_steps": 0,
    }
    wrong = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "use_vllm": True,
        "learning_rte": 1e-6,
        "lr_scheduler_type": ["cosine", 3],
        "num_iterations": 0,
    }
    with pytest.raises(ValueError, match="be") as refusal:
        GRPOConfig(**right, **wrong)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(wrong)
    for key in wrong:
        assert any(key in line for line in lines), key
    assert any("did you mean 'learning_rate'" in line for line in lines)
    assert any("micro_batch_tokens" in line for line in lines)


def test_broken_rules_are_told_at_once():
    with pytest.raises(ValueError, match="be") as refusal:
        GRPOConfig(lora_r=3, target_kl=0.1, max_steps=0)
    assert len(str(refusal.value).splitlines()) == 3


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
        (
            RLOOConfig,
            {"kl_controller": "adaptive", "kl_horizon": 12},
            "kl_horizon must be above",
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
            "dynamic_sampling_rounds",
        ),
        (RLOOConfig, {"kl_controller": "penalty", "kl_horizon": 5}, "kl_controller adaptive"),
        (
            PPOConfig,
            {"policy_loss": "kl_penalty", "old_kl_coef": 0.0, "old_kl_target": 0.1},
            "old_kl_target has no effect",
        ),
        (GRPOConfig, {"top_k": 50}, "top_k 50 .* truncated_sampling: ignore"),
        (PPOConfig, {"top_p": 0.9}, "^top_p 0.9"),
        (RLOOConfig, {"min_p": 0.1}, "^min_p 0.1"),
        (GRPOConfig, {"eval_success_threshold": 0.5}, "without num_generations_eval above 1"),
        (GRPOConfig, {"stop": ["a", ""]}, "stop must not hold an empty string"),
        (GRPOConfig, {"delta": 1.1}, "delta must be above"),
        (GRPOConfig, {"max_steps": 0}, "max_steps must be"),
        (PPOConfig, {"importance_sampling_level": "sequence"}, "importance_sampling_level .*'gae'"),
        (GRPOConfig, {"scale_rewards": "none", "scale_rewards_eps": 1e-6}, "scale_rewards_eps"),
        (GRPOConfig, {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range must be"),
        (
            GRPOConfig,
            {"reward_squash": "min_max", "normalize_rewards": True},
            "both set the scale of a score",
        ),
        (GRPOConfig, {"beta": 0.1, "kl_estimator": "k1"}, "expected gradient of 0"),
        (RLOOConfig, {"kl_estimator": "k3_ratio"}, "kl_estimator 'k3_ratio'"),
        (GRPOConfig, {"sync_ref_model": True}, "no effect without beta"),
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


def test_updates_per_step_are_passes_times_minibatches():
    assert GRPOConfig(num_iterations=3, num_mini_batches=2).updates_per_step == 6


# ----------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", None),
        ("seed", True),
        ("beta", True),
        ("micro_batch_tokens", True),
        ("epsilon_high", "none"),
        ("disable_dropout", 3),
        ("dtype", "float16"),
        ("aggregation", "mean"),
        ("scale_rewards", False),
        ("algorithm", "rloo"),
        ("output_dir", None),
        ("reward_weights", [1.0, "a"]),
        ("max_prompt_length", 1.5),
        ("advantage_estimator", "nothing_like_it"),
        ("policy_loss", "ppo"),
        ("report_to", ["wandb", "neptune"]),
        ("stop", ["a", {}]),
        ("dataset_test_split", 1.5),
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


def test_names_are_those_of_registries():
    """The config has them without torch."""
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert set(fields["advantage_estimator"].metadata["names"]) == set(ADVANTAGES)
    assert set(fields["policy_loss"].metadata["names"]) == set(POLICY_LOSSES)


def test_config_stays_a_dataclass():
    args = dataclasses.replace(PPOConfig(), learning_rate=1e-5)
    assert (args.learning_rate, args.vf_coef) == (1e-5, 0.1)
    assert dataclasses.asdict(args)["beta"] == 0.05
    defaults = {field.name: field.default for field in dataclasses.fields(PPOConfig)}
    assert (defaults["num_iterations"], defaults["stop"]) == (4, None)
    with pytest.raises(ValueError, match=r"^beta must be"):
        dataclasses.replace(args, beta=-1)


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
    class Plain(GRPOConfig):
        own: int = 3

    assert parse(Plain, ["--own", "4"]).own == 4
    mine = config(Plain)
    assert mine(beta=1, own=5).beta == 1
    with pytest.raises(ValueError, match=r"^beta must be"):
        mine(beta=-1)


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
    said = "gradient_checkpointing: offload is for GPUs; on a CPU it means true"
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
        ("betta: 0.1", "'betta'; did you mean 'beta'?"),
        ("num_generation: 4", "did you mean 'num_generations'?"),
        ("xyzzy: 1", "'xyzzy'"),
        ("gamma: 0.9", "'gamma'"),  # a key of another algorithm
        ("off: 1", "'False'"),
        ("seed: 1\nbeta: 0.1\nseed: 2", "'seed' is given twice"),
        ("beta: [1", "not valid YAML"),
        ("- beta", "expected `key: value` lines"),
        ("beta", "expected `key: value` lines"),
        ("seed: 1.5", "seed must be"),
        ("seed: null", "seed must be"),
        ("output_dir: null", "output_dir must be"),
        ("beta: high", "beta must be"),
        ("beta: -1", "beta must be"),
        ("beta: [1, 2]", "beta must be"),
        ("num_mini_batches: 99", "num_mini_batches must be at most prompts_per_step (16)"),
        ("dtype: float16", "dtype must be 'float32'"),
        ("gradient_checkpointing: 3", "gradient_checkpointing must be"),
        ("reward_weights: [a]", "reward_weights must be"),
        ("max_steps: {a: 1}", "max_steps must be"),
        ("policy_loss: clipped", "policy_loss must be one of"),
        ("report_to: [wandb, neptune]", "report_to must be"),
        ("algorithm: rloo", "algorithm must be 'grpo', got 'rloo'"),
        ('stop: ["--seed", 7, {a: 1}]', "stop must be"),
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
        ("--betta 0.1", "'beta'"),
        ("--beta -1", "beta must be"),
        ("--seed 1.5", "seed must be"),
        ("--seed --beta 0.1", "seed must be a number"),
        ("--dtype float16", "dtype must be"),
        ("--algorithm rloo", "algorithm must be"),
        ("--advantage_estimator leave_1_out", "did you mean 'leave_one_out'"),
        ("--conf recipe", "'conf'"),
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
    assert "beta must be" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- dump


OTHERS = {
    "output_dir": "runs/a: b # c",
    "dataset_name": ("org/data", "org/more"),
    "dataset_weights": (1.0, 2.0),
    "dataset_test_split": 0.1,
    "dataset_columns": {"prompt": "question: no", "answer": "a # b"},
    "prompt_template": "Q: {question}\n",
    "system_prompt": "Be --brief",
    "chat_template_kwargs": {"enable_thinking": False, "n": 1},
    "model_init_kwargs": {"revision": "v1", "rope_theta": 1e6},
    "gradient_checkpointing": "offload",
    "use_peft": True,
    "lora_target_modules": ("q_proj", "v_proj"),
    "disable_dropout": False,
    "pad_token": "<|pad|>",
    "save_total_limit": None,
    "report_to": ("tensorboard", "trackio"),
    "run_name": "third: try",
    "learning_rate": 1 / 3 * 1e-5,
}
WITH_REWARDS = {
    "reward_funcs": ("math", "length"),
    "reward_options": {"length": {"target": 9, "words": ["a: b", "--c"]}},
    "reward_weights": (1.0, -0.5, 1e-7),
    "reward_clip_range": (-1.0, 2.5),
    "stop": ("\n", "a: b # c"),
    "adam_epsilon": 1e-5,
    "micro_batch_tokens": 1000,
    "given_in_python": ("tools", "optimizers"),
    "shuffle_dataset": False,
}


@pytest.mark.parametrize("url", ["http://me:S3CRET@a", "http://a?key=S3CRET", "http://a/#S3CRET"])
def test_secret_in_server_address_is_rejected_and_hidden(url):
    with pytest.raises(ValueError, match="vllm_server_base_url has") as error:
        GRPOConfig(rollout_engine="vllm_server", vllm_server_base_url=url)
    assert "S3CRET" not in str(error.value)


@each_config
def test_dumped_config_parses_back_to_itself(config, tmp_path):
    more = WITH_REWARDS if config in TRAINERS else {}
    for original in (config(), config(**OTHERS, **more)):
        dump(original, tmp_path / "config.yaml")
        assert parse(config, ["--config", str(tmp_path / "config.yaml")]) == original


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
        (GRPOConfig, {"advantage_estimator": "gae"}, "'gae' needs a critic"),
        (
            PPOConfig,
            {"advantage_estimator": "leave_one_out"},
            "does not use the critic.*choose gae",
        ),
        (
            PPOConfig,
            {"critic": "shared", "value_model_name_or_path": "x"},
            "value_model_name_or_path has no effect without critic separate",
        ),
        (GRPOConfig, {"target_kl": 0.1}, "raise num_iterations or num_mini_batches"),
        (GRPOConfig, {"lora_r": 8}, "lora_r has no effect without use_peft"),
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
        (GRPOConfig, {"lora_target_modules": ["q_proj"]}, "lora_target_modules has no effect"),
        (GRPOConfig, {"use_peft": True, "lora_dropout": 0.1}, "needs disable_dropout: false"),
        (
            GRPOConfig,
            {"router_aux_loss_coef": 0.1, "disable_dropout": False},
            "^router_aux_loss_coef needs disable_dropout: true",
        ),
        (GRPOConfig, {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be"),
    ],
)
def test_useless_or_ignored_option_raises(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)
