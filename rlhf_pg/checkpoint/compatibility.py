"""The check that a checkpoint belongs to this run, and which settings a resumed run may change."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Keys of the training data: only the rows matter, which have a fingerprint.
OF_DATA = {
    *("task", "task_options", "dataset_name", "dataset_config", "dataset_columns"),
    *("dataset_train_split", "prompt_template", "system_prompt", "apply_chat_template"),
    *("chat_template", "chat_template_date"),
}
# Keys of a config with locations, which do not affect the result.
PLACES = {
    *("output_dir", "resume_from_checkpoint", "run_name", "report_to", "logging_steps"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "save_steps", "save_total_limit"),
    *("num_completions_to_print", "log_completions_steps", "vllm_server_base_url", "ddp_timeout"),
    "vllm_sync_directory",
}
# Keys that a resumed run may change: length, intervals, paths, failures, and keys that never change
# a result.
MAY_CHANGE = PLACES | {
    *("model_name_or_path", "value_model_name_or_path", "max_steps", "num_train_epochs"),
    *("save_best", "save_merged", "trust_remote_code", "max_skipped_steps"),
    *("eval_steps", "num_generations_eval", "eval_success_threshold", "gradient_checkpointing"),
    *("micro_batch_tokens", "micro_batch_size", "rollout_cache_tokens", "rollout_workers"),
    *("reward_timeout", "reward_workers", "on_reward_error", "reward_error_value"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length"),
    *("vllm_server_timeout", "environment_timeout"),
    *(*OF_DATA, "dataset_test_split", "eval_dataset_name", "dataset_fingerprint"),
    # Models and adapters have fingerprints.
    *("teacher_model_name_or_path", "trainer", "given_in_python"),
}
# Keys that may change with a warning: peaks of the schedule; the length of the run, which changes
# later learning rates; and names of rewards, to allow fixed functions.
WARNED = {
    *("learning_rate", "value_learning_rate", "max_steps", "num_train_epochs"),
    *("reward_funcs", "reward_options", "reward_model_name_or_path"),
}

# Inputs that must be the same as in the resumed run, and how to provide them.
REMEDIES = {
    "model": "the same base model and peft_config",
    "reference": "the model that training started from, and with the same beta",
    "critic": "the same value_model",
    "teacher": "the same teacher",
    "tokenizer": "the same processing_class, vocabulary and chat template",
    "train_dataset": "the same rows in the same order, or start a new run from its weights",
}


def check(
    path: Path,
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    fingerprints: Mapping[str, str | None],
    running: Iterable[str],
    counters: Iterable[str],
) -> str:
    """Compare `saved`, from `state.json`, with this run; return the changes to warn of. ValueError,
    with a remedy, if the runs do not match.
    """
    if saved["counters"].keys() != set(counters):
        raise ValueError(
            f"{path} was saved by rlhf_pg {saved.get('version', 'before 0.1')}, with the counters "
            f"{', '.join(saved['counters'])}: resume with that version, or load it as a model"
        )
    now = json.loads(json.dumps(config))
    fixed = saved["config"].keys() - MAY_CHANGE - WARNED
    if other := describe_changes(saved["config"], now, fixed):
        raise ValueError(
            f"{path} was saved with another config: {other}. Resume with the same config, or "
            "start a new run from its weights"
        )
    for name, remedy in REMEDIES.items():
        if saved["fingerprints"].get(name) != fingerprints.get(name):
            raise ValueError(f"{path} was saved by a run with another {name}: resume with {remedy}")
    theirs, ours = (", ".join(sorted(names)) or "nothing" for names in (saved["running"], running))
    if theirs != ours:  # their names include those of reward functions
        raise ValueError(
            f"{path} was saved with running statistics of {theirs}, but this run has them of "
            f"{ours}: resume with the same reward functions"
        )
    return describe_changes(saved["config"], now, WARNED)


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Describe how these keys of a config have changed; "" if none has."""
    return "; ".join(
        f"{key} was {saved[key]!r} and is {now[key]!r}"
        for key in sorted(saved.keys() & now.keys() & set(keys))
        if saved[key] != now[key]
    )
