"""Keys of other libraries, and keys that are gone: each says what to use here."""

import dataclasses
import re
from pathlib import Path

import pytest

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.cli import main
from rlhf_pg.config import (
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    RewardModelConfig,
    RLOOConfig,
    SFTConfig,
)
from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS, HINTS, REASONS, SUPERVISED_HINTS, unknown
from rlhf_pg.config.parse import parse

TRAINERS = [GRPOConfig, RLOOConfig, ReinforceConfig, PPOConfig]
SUPERVISED = [SFTConfig, RewardModelConfig]


def keys(config) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


OURS = set().union(*map(keys, [*TRAINERS, *SUPERVISED]))
# The keys of PPOConfig in TRL 0.11.4 and 0.29.1, those of TrainingArguments only where TRL's
# examples set them; docs/ppo-2026.md shows the answers.
PPO_KEYS = {
    "0.11": """
        exp_name seed log_with task_name model_name query_dataset reward_model
        remove_unused_columns tracker_kwargs accelerator_kwargs project_kwargs tracker_project_name
        push_to_hub_if_best_kwargs steps learning_rate adap_kl_ctrl init_kl_coef kl_penalty target
        horizon gamma lam cliprange cliprange_value vf_coef batch_size forward_batch_size
        mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm
        optimize_cuda_cache optimize_device_cache early_stopping target_kl compare_steps
        ratio_threshold use_score_scaling use_score_norm score_clip whiten_rewards
        gradient_checkpointing is_encoder_decoder is_peft_model backward_batch_size
        global_backward_batch_size global_batch_size dataset_num_proc
    """,
    "0.29": """
        learning_rate dataset_num_proc num_mini_batches total_episodes
        local_rollout_forward_batch_size num_sample_generations response_length stop_token
        stop_token_id temperature missing_eos_penalty sft_model_path world_size num_total_batches
        micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size
        push_to_hub reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs
        whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam
        ds3_gather_for_generation output_dir per_device_train_batch_size
        gradient_accumulation_steps eval_strategy eval_steps report_to
    """,
}
PPO_OF_TRL = {version: names.split() for version, names in PPO_KEYS.items()}


@pytest.mark.parametrize("key", ["lr", "per_device_train_batch_size", "loss_type", *REASONS])
def test_error_is_the_same_in_python_yaml_and_flags(capsys, tmp_path, key) -> None:
    said = unknown(key, GRPOConfig)
    assert (HINTS | REASONS)[key] in said
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"algorithm: grpo\n{key}: 1\n")
    for flags in (["--config", str(recipe)], [f"--{key}", "1"], [f"--{key}=1"]):
        with pytest.raises(SystemExit) as caught:
            parse(GRPOConfig, flags)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        GRPOConfig(**{key: 1})


@pytest.mark.parametrize("version", PPO_OF_TRL)
def test_every_key_of_ppo_in_trl_has_answer(version) -> None:
    assert set(PPO_OF_TRL[version]) <= keys(PPOConfig) | HINTS.keys() | REASONS.keys()


def test_hints_name_keys() -> None:
    for hint in [*HINTS.values(), *SUPERVISED_HINTS.values()]:
        assert re.match(r"\w+", hint)[0] in OURS, hint


@pytest.mark.parametrize(
    ("key", "ours"),
    [("per_device_train_batch_size", "batch_size"), ("use_vllm", "rollout_engine.*, of grpo, ")],
)
def test_supervised_run_has_hints_of_its_own(key, ours) -> None:
    with pytest.raises(ValueError, match=f"{key}.* {ours}"):
        SFTConfig(**{key: 1})


def test_foreign_arguments_say_what_to_use() -> None:
    with pytest.raises(TypeError) as caught:
        PPOTrainer(config=1, model="m", ref_model=2, reward_model=3, value_model=4, tokenizer=5)
    for name in ("config", "ref_model", "reward_model", "tokenizer"):
        assert f"{name!r} {FOREIGN_ARGUMENTS[name]}" in str(caught.value)
    with pytest.raises(TypeError, match="unknown_argument"):
        GRPOTrainer(unknown_argument=1)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--dtype=float16", "bfloat16"),
        ("--loss_type=dr_grpo", "dr_grpo the preset"),
        ("--early_stopping_patience=3", "examples/early_stopping.py"),
        ("--use_cpu=true", "CUDA_VISIBLE_DEVICES"),
        ("--image_column=image", "text only"),
        ("--algorithm.adv_estimator=gae", "docs/from-verl.md"),
        ("data.train_files=a.parquet", "docs/from-verl.md"),
    ],
)
def test_usual_keys_of_others_have_their_answer(capsys, given, answer) -> None:
    with pytest.raises(SystemExit):
        parse(GRPOConfig, [given])
    assert answer in capsys.readouterr().err


def test_config_of_verl_has_one_answer(capsys, tmp_path) -> None:
    """Also where its section has the name of a key of ours."""
    file = tmp_path / "ppo.yaml"
    for text in ("trainer: {total_epochs: 1}", "algorithm: {adv_estimator: gae}\nlr: 1"):
        file.write_text(text)
        for read in (
            lambda: parse(GRPOConfig, ["--config", str(file)]),
            lambda: main(["train", str(file)]),
        ):
            with pytest.raises(SystemExit):
                read()
            (line,) = capsys.readouterr().err.splitlines()
            assert "docs/from-verl.md" in line


def test_page_on_verl_names_keys() -> None:
    page = Path(__file__).parents[2] / "docs" / "from-verl.md"
    rows = re.findall(r"^\| (`.*`.*) \| (.*) \|$", page.read_text(), re.M)
    assert len(rows) >= 40
    for theirs, here in rows:
        named = re.match(r"`(\w+)[`:]", here)
        assert named is None or named[1] in OURS | {"algorithm"}, theirs
