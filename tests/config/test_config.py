"""Config keys: types, ranges, and defaults < YAML < flags; each error names its key."""

import dataclasses
import re

import pytest

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
from rlhf_pg.config.fields import ConfigError, bind, metadata
from rlhf_pg.config.parse import dump, parse
from rlhf_pg.losses import POLICY_LOSSES

NAN = float("nan")
TRAINERS = [GRPOConfig, RLOOConfig, ReinforceConfig, PPOConfig]
CONFIGS = [*TRAINERS, SFTConfig, RewardModelConfig]
PROCESS, SOURCES = "process_group_normalized", "group_normalized_per_source"
TEACHER = {"teacher_model_name_or_path": "x", "num_iterations": 2}
FP8 = {"rollout_engine": "vllm", "vllm_quantization": "fp8"}
PAID_KL = {"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
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


@pytest.mark.fault(33, "refused by name when it is read")
@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GRPOConfig, "temperature", float("nan")),
        (GRPOConfig, "seed", True),
        (GRPOConfig, "reward_weights", [1.0, "a"]),
        (GRPOConfig, "advantage_estimator", "nothing_like_it"),
        (GRPOConfig, "report_to", ["wandb", "neptune"]),
        (GRPOConfig, "dataset_test_split", 1.5),
        (SFTConfig, "label_smoothing", 1.0),
    ],
)
def test_wrong_value_is_refused_by_its_key(config, key, value):
    with pytest.raises(ValueError, match=rf"^{key} must be .*, got "):
        config(**{key: value})


def test_everything_wrong_is_told_at_once():
    """Keys of TRL, a misspelt one and wrong values: a line for each."""
    wrong = {"use_vllm": True, "learning_rte": 1, "lr_scheduler_type": [3], "num_iterations": 0}
    with pytest.raises(ValueError, match="did you mean 'learning_rate'") as refusal:
        GRPOConfig(seed=1, logging_steps=1.0, **wrong)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(wrong)
    for key in wrong:
        assert any(key in line for line in lines), key


@pytest.mark.parametrize("more", [{"num_iterations": 2}, {"num_mini_batches": 2}])
def test_vanilla_loss_with_several_updates_raises(more):
    assert ReinforceConfig().policy_loss == "vanilla"
    with pytest.raises(ValueError, match=r'policy_loss "vanilla".*"clipped_surrogate"'):
        ReinforceConfig(**more)
    assert ReinforceConfig(policy_loss="clipped_surrogate", **more).updates_per_step == 2


@pytest.mark.parametrize(
    ("config", "options", "key"),
    [
        (GRPOConfig, {"num_mini_batches": 17}, "num_mini_batches"),
        (RLOOConfig, {"kl_controller": "adaptive", "kl_horizon": 12}, "kl_horizon"),
        (GRPOConfig, {"sampler_correction": "token_mask", "sampler_clip_min": 3.0}, "clip_min"),
        (GRPOConfig, {"sampler_clip_max": 9.0}, "sampler_clip_max"),
        (GRPOConfig, {"entropy_target": 1.0, "entropy_coef": 2.0}, "entropy_coef"),
        (GRPOConfig, {"entropy_target": 1.0, "entropy_coef_min": 0.1}, "entropy_coef_min"),
        (PPOConfig, {"policy_loss": "kl_penalty", "old_kl_coef": 0.0, "old_kl_target": 0.1}, "old"),
        (GRPOConfig, {"top_k": 50}, "top_k 50 .* truncated_sampling: ignore"),
        (PPOConfig, {"top_p": 0.9}, "^top_p 0.9"),
        (GRPOConfig, {"eval_success_threshold": 0.5}, "num_generations_eval"),
        (GRPOConfig, {"stop": ["a", ""]}, "stop"),
        (GRPOConfig, {"delta": 1.1}, "delta"),
        (GRPOConfig, {"max_steps": 0}, "max_steps"),
        (PPOConfig, {"importance_sampling_level": "sequence"}, "importance_sampling_level .*'gae'"),
        (GRPOConfig, {"scale_rewards": "mean", "scale_rewards_eps": 1e-6}, "scale_rewards_eps"),
        (GRPOConfig, {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range"),
        (GRPOConfig, {"reward_squash": "min_max", "normalize_rewards": True}, "reward_squash"),
        (GRPOConfig, {"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator"),
        (RLOOConfig, {"kl_estimator": "k3_ratio"}, "kl_estimator"),
        (GRPOConfig, {"sync_ref_model": True}, "beta"),
        (ReinforceConfig, {"advantage_estimator": "leave_one_out"}, "num_generations"),
        (ReinforceConfig, {"prompts_per_step": 1}, "num_generations"),
        (RLOOConfig, {"gamma": 0.5}, "gamma"),
        (ReinforceConfig, {"epsilon": 0.1}, "epsilon .*'vanilla'"),
        (GRPOConfig, {"advantage_estimator": "gae"}, "'gae'"),
        (PPOConfig, {"advantage_estimator": "leave_one_out"}, "critic.*gae"),
        (PPOConfig, {"critic": "shared", "value_model_name_or_path": "x"}, "value_model_name"),
        (GRPOConfig, {"target_kl": 0.1}, "num_iterations or num_mini_batches"),
        (GRPOConfig, {"lora_r": 8}, "lora_r .*use_peft"),
        (GRPOConfig, {"use_peft": True, "lora_dropout": 0.1}, "disable_dropout"),
        (GRPOConfig, {"rollout_engine": "native", "vllm_max_model_length": 9}, "rollout_engine"),
        (GRPOConfig, {"rollout_engine": "vllm", "rollout_cache_tokens": 9}, "rollout_engine"),
        (GRPOConfig, {"rollout_engine": "vllm", "vllm_server_timeout": 9.0}, "rollout_engine"),
        (GRPOConfig, {"vllm_quantization": "fp8"}, "rollout_engine"),
        (GRPOConfig, FP8 | {"sampler_correction": "none"}, "sampler_correction"),
        (GRPOConfig, {"rollout_engine": "vllm_server", "vllm_server_base_url": "a:1"}, "http://"),
        (GRPOConfig, {"dynamic_sampling_rounds": 1, "advantage_estimator": PROCESS}, "dynamic"),
        (GRPOConfig, {"ptx_coef": 0.1}, "ptx_coef .*ptx_dataset_name"),
        (GRPOConfig, {"ptx_dataset_name": "texts.txt"}, "ptx_dataset_name .*ptx_coef"),
        (GRPOConfig, {"advantage_estimator": SOURCES, **PAID_KL}, "kl_placement"),
        (GRPOConfig, {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        (GRPOConfig, {"overlong_buffer": 9, "max_completion_length": 8}, "overlong_buffer"),
        (GRPOConfig, {"overlong_penalty": 2.0}, "overlong_penalty"),
        (GRPOConfig, {"missing_eos_mode": "replace"}, "missing_eos_mode"),
        (GRPOConfig, {"whiten_rewards": True}, "whiten_rewards .*'group_normalized'"),
        (PPOConfig, {"vf_coef": 0.0, "value_lam": 1.0}, "value_lam .*vf_coef"),
        (PPOConfig, {"vf_coef": 0.0, "normalize_values": True}, "normalize_values .*vf_coef"),
        (PPOConfig, {"value_init": "random", "value_model_name_or_path": "x"}, "value_model_name"),
        (GRPOConfig, {"teacher_coef": 0.5}, "teacher_coef"),
        (GRPOConfig, {**TEACHER, "teacher_gamma": 0.5}, "teacher_gamma"),
        (GRPOConfig, {**TEACHER, "teacher_mixture": 0.4}, "teacher_mixture"),
        (GRPOConfig, {**TEACHER, "policy_loss": "none", "target_kl": 0.1}, "target_kl"),
        (GRPOConfig, {"model_init_kwargs": {"device_map": "auto"}}, "model_init_kwargs .*launcher"),
        (GRPOConfig, {"model_init_kwargs": {"trust_remote_code": True}}, "set trust_remote_code"),
        (
            GRPOConfig,
            {"model_init_kwargs": {"use_kernels": True}},
            "model_init_kwargs .*use_kernels",
        ),
    ],
)
def test_option_that_harms_or_has_no_effect_is_refused(config, options, key):
    with pytest.raises(ValueError, match=key):
        config(**options)


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({}, "none"),
        ({"rollout_engine": "native"}, "none"),
        ({"rollout_engine": "native", "sampler_correction": "token_mask"}, "token_mask"),
        ({"rollout_engine": "vllm", "sampler_clip_max": 2.0}, "token_truncate"),
        ({"rollout_engine": "vllm_server"}, "token_truncate"),
        (FP8, "token_truncate"),
        ({"rollout_engine": "vllm", "sampler_correction": "none"}, "none"),
    ],
)
def test_off_policy_sampler_is_corrected_by_default(options, correction):
    args = GRPOConfig(**options)
    assert args.correction_of(args.rollout_engine) == correction


def test_what_follows_from_a_wrong_key_is_not_an_error():
    """The penalty needs a buffer, which is there, though too long."""
    keys = {"overlong_penalty": 2.0, "max_completion_length": 8}
    for buffer in (9, 0):
        with pytest.raises(ConfigError) as caught:
            GRPOConfig(**keys, overlong_buffer=buffer)
        assert [key for key, _ in caught.value.messages] == ["overlong_buffer"]


def test_names_are_those_of_registries():
    """The config has them without torch."""
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    for key, registry in (("advantage_estimator", ADVANTAGES), ("policy_loss", POLICY_LOSSES)):
        ours = {name for name in registry if ":" not in name}  # other tests have their own
        assert set(fields[key].metadata["names"]) == ours


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
    assert bind(loss, config)("x") == ("x", 0.5, 0.4, 1)


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
    name = flag[0].removeprefix("--")
    words = metadata(GRPOConfig).items()
    replaced = [key for key, of_key in words if name in of_key.get("replaced_by", "").split()]
    assert replaced
    assert all(getattr(config, key) == getattr(default, key) for key in replaced)
    assert {key: getattr(config, key) for key in kept} == kept


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # a string to PyYAML
        ("epsilon_high: null", "epsilon_high", None),
        ("gradient_checkpointing: offload", "gradient_checkpointing", "offload"),
        ("output_dir: '007'", "output_dir", "007"),
        ("report_to: [tensorboard, wandb]", "report_to", ("tensorboard", "wandb")),
        ("report_to: none", "report_to", ()),
        ('stop: ["\\n\\n", "User: "]', "stop", ("\n\n", "User: ")),
        ('stop: ["--seed", "7"]', "stop", ("--seed", "7")),
        ("run_name: 2026", "run_name", "2026"),
        ("run_name: --seed", "run_name", "--seed"),
        ("reward_weights: 2", "reward_weights", (2.0,)),
        ("<<: {seed: 7, beta: 0.1}\nseed: 8", "seed", 8),
    ],
)
def test_yaml_values_keep_their_type(recipe, line, key, value):
    result = getattr(read(GRPOConfig, recipe, line), key)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--epsilon_high None", "epsilon_high", None),
        ("--reward_weights -1 2", "reward_weights", (-1.0, 2.0)),
        ("--reward_weights [1.0,0.5]", "reward_weights", (1.0, 0.5)),
        ("--stop [END]", "stop", ("[END]",)),
        ("--disable_dropout False", "disable_dropout", False),
        ("--report_to tensorboard wandb --seed 1", "report_to", ("tensorboard", "wandb")),
        ("--gradient_checkpointing --seed 1", "gradient_checkpointing", True),
        ("--gradient_checkpointing=false", "gradient_checkpointing", False),
        ("--gradient_checkpointing offload", "gradient_checkpointing", "offload"),
    ],
)
def test_flags_have_declared_type(flags, key, value):
    assert getattr(parse(GRPOConfig, flags.split()), key) == value


@pytest.mark.parametrize("given", [False, True, "offload"])
def test_offload_on_cpu_is_checkpointing(caplog, given) -> None:
    for config_type in (GRPOConfig, SFTConfig):
        args = config_type(gradient_checkpointing=given, dtype="float32")
        assert args.on("cuda") is args
        assert args.on("cpu").gradient_checkpointing is bool(given)
    said = "gradient_checkpointing: offload is for GPUs; on a CPU it means true"
    assert [r.getMessage() for r in caplog.records] == [said] * (2 * (given == "offload"))


def test_auto_dtype_is_that_of_the_device() -> None:
    for config_type in (GRPOConfig, SFTConfig):
        args = config_type()
        assert [args.on(device).dtype for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
        assert config_type(dtype="float64").on("cuda", "bfloat16").dtype == "float64"


def test_later_recipe_wins_and_keys_of_other_algorithms_are_left_out(recipe, tmp_path, caplog):
    recipe.write_text("algorithm: ppo\nvf_coef: 0.5\nbeta: 0.1\nepsilon: 0.3\n")
    method = tmp_path / "method.yaml"
    method.write_text("algorithm: rloo\nbeta: 0.2\n")
    args = parse(RLOOConfig, ["--config", str(recipe), str(method)])
    assert (args.beta, args.epsilon, args.algorithm) == (0.2, 0.3, "rloo")
    assert "vf_coef" in caplog.text


def test_flags_none_and_false_win_over_recipe(recipe):
    recipe.write_text("use_peft: true\nlora_r: 8\nepsilon_high: 0.3\n")
    args = parse(
        GRPOConfig, ["--config", str(recipe), "--use_peft", "false", "--epsilon_high", "null"]
    )
    assert (args.use_peft, args.lora_r, args.epsilon_high) == (False, 16, None)
    args = parse(GRPOConfig, ["--config", str(recipe), "--use_peft", "true"])
    assert (args.use_peft, args.lora_r) == (True, 8)


def test_types_names_and_rules_are_checked_in_one_round(recipe, capsys):
    recipe.write_text(
        "kl_coeff: 0.1\nclip_range: 0.2\nseed: 1.5\nlora_r: 8\nnum_mini_batches: 99\n"
    )
    error = error_of(capsys, GRPOConfig, "--config", str(recipe))
    said = ("see beta", "see epsilon", "seed must be", "lora_r", "num_mini_batches must be at most")
    assert [text for text in said if text not in error] == []


@pytest.mark.fault(32, "one error names key and file, and the nearest key")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("betta: 0.1", "'betta'; did you mean 'beta'?"),
        ("algorithm: grpo\ngamma: 0.9", "'gamma' is a key of reinforce, ppo"),
        ("off: 1", "'False'"),
        ("seed: 1\nbeta: 0.1\nseed: 2", "'seed' is given twice"),
        ("beta: [1", "not valid YAML"),
        ("- beta", "expected `key: value` lines"),
        ("beta: -1", "beta must be"),
        ("num_mini_batches: 99", "num_mini_batches must be at most"),
        ("algorithm: rloo", "algorithm must be"),
        ('stop: ["--seed", 7, {a: 1}]', "stop must be"),
    ],
)
def test_bad_recipe_is_one_error_with_key_and_file(capsys, tmp_path, recipe, text, said):
    recipe.write_text(text + "\n")
    error = error_of(capsys, GRPOConfig, "--config", str(recipe))
    assert said in error
    assert str(recipe) in re.sub(r" ", "", error)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--betta 0.1", "'beta'"),
        ("--seed --beta 0.1", "seed must be a number"),
        ("--advantage_estimator leave_1_out", "did you mean 'leave_one_out'"),
        ("--conf recipe", "'conf'"),
        ("surplus", "surplus"),
        ("--chat_template_kwargs [", "chat_template_kwargs must be a mapping"),
    ],
)
def test_bad_flag_is_one_error_with_name(capsys, flags, said):
    error = error_of(capsys, GRPOConfig, *flags.split())
    assert said in error
    assert ".yaml" not in error


def test_only_first_rank_prints_error(capsys, monkeypatch, recipe):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as refusal:
        read(GRPOConfig, recipe, "beta: -1")
    assert refusal.value.code == 2
    assert capsys.readouterr() == ("", "")


# Values that YAML could take for others.
OTHERS = {
    "output_dir": "runs/a: b # c",
    "dataset_name": ("org/data", "org/more"),
    "dataset_weights": (1.0, 2.0),
    "dataset_columns": {"prompt": "question: no", "answer": "a # b"},
    "prompt_template": "Q: {question}\n",
    "system_prompt": "Be --brief",
    "chat_template_kwargs": {"enable_thinking": False, "n": 1},
    "model_init_kwargs": {"revision": "v1", "rope_theta": 1e6},
    "pad_token": "<|pad|>",
    "save_total_limit": None,
    "learning_rate": 1 / 3 * 1e-5,
}
WITH_REWARDS = {
    "reward_funcs": ("math", "length"),
    "reward_options": {"length": {"target": 9, "words": ["a: b", "--c"]}},
    "reward_weights": (1.0, -0.5, 1e-7),
    "stop": ("\n", "a: b # c"),
}


@pytest.mark.parametrize("url", ["http://me:S3CRET@a", "http://a?key=S3CRET", "http://a/#S3CRET"])
def test_secret_in_server_address_is_rejected_and_hidden(url):
    with pytest.raises(ValueError, match="vllm_server_base_url") as error:
        GRPOConfig(rollout_engine="vllm_server", vllm_server_base_url=url)
    assert "S3CRET" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, "S3CRET")
            for name in ("api_key", "token", "DB-Password", "X-Api-Key", "authToken")
        ],
        ("headers", {"Authorization": "Bearer S3CRET"}),
        ("urls", ["postgres://me:S3CRET@host/db"]),
    ],
)
def test_secret_in_options_is_refused_without_its_value(name, value):
    with pytest.raises(ValueError, match="environment variable") as error:
        GRPOConfig(reward_funcs="m.py:f", reward_options={"m.py:f": {name: value}})
    assert name in str(error.value)
    assert "S3CRET" not in str(error.value)


def test_names_of_variables_and_of_tokens_are_no_secrets():
    own = {
        "stop_token": "</s>",
        "token": "$TOKEN",
        "api_key_env": "KEY",
        "secretary": "a",
        "key": "b",
    }
    GRPOConfig(pad_token="<pad>", reward_options={"secret/token.py:f": own})


@each_config
def test_dumped_config_parses_back_to_itself(config, tmp_path):
    more = WITH_REWARDS if config in TRAINERS else {}
    for original in (config(), config(**OTHERS, **more)):
        dump(original, tmp_path / "config.yaml")
        assert parse(config, ["--config", str(tmp_path / "config.yaml")]) == original


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('run_name: "a\\e[2J\\0\\u202eb"', ["--help"]),
        ('run_name: "\\e[2J"', ["--nothing", "1"]),
        ('run_name: "\\e[2J"\nseed: x', []),
        ('"\\e[2J": 5', []),
        ("!\u202e [", []),
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
