"""Settings in which two runs differ: keys of the config, versions of libraries, reward functions.

None of it is a difference in what a run computed. It is what may have caused one.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_pg.checkpoint.compatibility import OF_DATA, lengths
from rlhf_pg.replay.finding import STAGES, Finding, shown_name, value
from rlhf_pg.replay.rounding import LAYOUT_KEYS
from rlhf_pg.report.model_card import PLACES
from rlhf_pg.report.run_files import RunFiles, Start

# Keys that say where things are, what is saved, logged and shown.
ASIDE = PLACES | {
    *("save_steps", "save_best", "save_merged", "save_total_limit", "trust_remote_code"),
    *("log_completions_steps", "num_completions_to_print", "logging_steps"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length"),
    *("vllm_server_timeout", *LAYOUT_KEYS),
}
# Keys with names of files, directories and servers, of which only the last part counts.
NAMED = {
    *("model_name_or_path", "value_model_name_or_path", "reward_model_name_or_path", "task"),
    *("dataset_name", "eval_dataset_name", "reward_funcs", "reward_options"),
}
# The stage at which a key acts for the first time. Others act before the first step, as far as
# this table knows.
ACTS_AT = {
    "data order": (
        *("shuffle_dataset", "shuffle_buffer_size", "streaming", "dataset_weights"),
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
        *("prompts_per_step", "long_prompts", "max_prompt_length", "task_options"),
        "dynamic_sampling_rounds",
    ),
    "prompt text": (
        *("dataset_columns", "prompt_template", "system_prompt", "apply_chat_template"),
        "chat_template_kwargs",
    ),
    "sampled id": (
        *("num_generations", "rollout_engine", "max_completion_length", "max_turns"),
        *("temperature", "top_k", "top_p", "min_p", "truncated_sampling", "stop"),
        *("environment_timeout"),
    ),
    "log-probability": ("old_logprobs_source",),
    "reward": (
        *("reward_funcs", "reward_options", "reward_model_name_or_path", "reward_model_sees_eos"),
        *("reward_model_closes_truncated", "on_reward_error", "reward_error_value"),
        *("reward_weights", "reward_clip_range", "reward_squash", "normalize_rewards"),
        *("reward_workers", "reward_timeout"),
        *("missing_eos_penalty", "missing_eos_mode", "overlong_buffer", "overlong_penalty"),
    ),
    "advantage": (
        *("advantage_estimator", "normalize_advantages", "whiten_rewards", "scale_rewards"),
        *("scale_rewards_eps", "beta", "kl_placement", "kl_estimator", "kl_controller"),
        *("kl_target", "kl_horizon", "gamma", "lam", "lam_alpha", "value_lam", "n_steps"),
        *("bootstrap_truncated", "mask_truncated_completions"),
    ),
    "gradient": (
        *("num_iterations", "num_mini_batches", "policy_loss", "aggregation", "epsilon"),
        *("epsilon_high", "delta", "importance_sampling_level", "sapo_temperature_pos"),
        *("sapo_temperature_neg", "old_kl_coef", "old_kl_target", "sampler_correction"),
        *("sampler_clip_max", "sampler_clip_min", "entropy_coef", "entropy_target"),
        *("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max", "positive_nll_coef"),
        *("positive_nll_threshold", "router_aux_loss_coef", "disable_dropout", "vf_coef"),
        *("cliprange_value", "skip_zero_advantages", "target_kl", "value_iterations"),
        # An update of a step has them in its gradient where another went before it.
        *("learning_rate", "value_learning_rate", "lr_scheduler_type", "warmup_steps"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim"),
        *("value_warmup_steps", "value_pretraining_steps", "kl_adaptive_lr"),
        *("kl_adaptive_lr_min", "kl_adaptive_lr_max", "bfloat16_update"),
    ),
    "weight": ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
    "metric": ("eval_steps", "num_generations_eval", "eval_success_threshold", "eval_dataset_name"),
    "length": ("max_steps", "num_train_epochs", "max_skipped_steps"),
}
NO_FUNCTIONS = ("model", "judge", "http", "https")  # what may stand before the colon of a reward
BEFORE = -1  # the stage of what acts before the first step
STAGE_OF = {key: STAGES.index(stage) for stage, keys in ACTS_AT.items() for key in keys}
# These may differ, and all that they can change is the learning rate, where its schedule is long.
RATE = STAGES.index("gradient")


@dataclass(frozen=True, kw_only=True)
class KeyDifference:
    """A key of the config that is not the same in both runs.

    Attributes:
        acts_at: number of the stage that it changes first; `BEFORE` if the start of the run; None
            if it is known to have changed nothing.
    """

    key: str
    a: Any
    b: Any
    acts_at: int | None

    def __str__(self) -> str:
        return f"{shown_name(self.key)} was {value(self.a)} and is {value(self.b)}"

    def may_cause(self, finding: Finding, unseen: bool) -> bool:
        """Return whether the key can be why the runs differ.

        Args:
            unseen: the weights before the step were not compared, so what the key did to an earlier
                step may only be seen now.
        """
        if self.acts_at is None or finding.step == 0:
            return self.acts_at == BEFORE
        return self.acts_at <= STAGES.index(finding.stage) or (unseen and finding.step > 1)


def config_differences(a: RunFiles, b: RunFiles) -> tuple[list[KeyDifference], list[str]]:
    """Return the keys that differ and may matter; and names of keys that only one version has."""
    if not (a.config and b.config):
        return [], []
    keys = [*a.config, *(key for key in b.config if key not in a.config)]
    both = [key for key in keys if key in a.config and key in b.config]
    alone = [key for key in keys if key not in both and key not in ASIDE]
    if _same_versions(a, b):
        both, alone = [*both, *alone], []
    sourced = all(
        start is not None and start.rewards for start in (environment(a, 1), environment(b, 1))
    )
    differing = [
        key for key in both if key not in ASIDE and _told(a, key, sourced) != _told(b, key, sourced)
    ]
    if same_weights_at_start(a, b):
        differing = [key for key in differing if key not in NAMED or key not in _MODELS]
    return [
        KeyDifference(
            key=key, a=a.config.get(key), b=b.config.get(key), acts_at=_acts_at(key, a, b)
        )
        for key in differing
    ], alone


_MODELS = {"model_name_or_path", "value_model_name_or_path"}


def same_weights_at_start(a: RunFiles, b: RunFiles) -> bool:
    """Return whether both runs are known to have begun with the same weights."""
    first, second = (next((s.weights for s in run.starts if s.step == 0), {}) for run in (a, b))
    return bool(first) and first == second


def data_differ(a: RunFiles, b: RunFiles) -> bool | None:
    """Return whether the training data differ, by their fingerprints; None if not known."""
    first, second = (run.config.get("dataset_fingerprint") for run in (a, b))
    return None if first is None or second is None else first != second


def _acts_at(key: str, a: RunFiles, b: RunFiles) -> int | None:
    if key == "dataset_fingerprint":  # it says that data differ, which has a cause of its own
        return None
    if key in OF_DATA and key != "task" and data_differ(a, b) is False:
        return None
    if key in lengths(a.config) | lengths(b.config):
        return RATE
    return STAGE_OF.get(key, BEFORE)


def _told(run: RunFiles, key: str, sourced: bool) -> Any:
    """Return the value of a key as it is compared.

    Args:
        sourced: the sources of reward functions are known, so it does not matter where they are.
    """
    stored = run.config.get(key)
    if key == "reward_funcs" and sourced and isinstance(stored, list | tuple):
        return [_function(name) for name in stored]
    if key == "reward_options" and sourced and isinstance(stored, dict):
        return {_function(name): placeless(options) for name, options in stored.items()}
    return placeless(stored) if key in NAMED else stored


def _function(name: Any) -> Any:
    """Return the name of a reward function without its file or module; of another reward all."""
    kind, colon, function = str(name).rpartition(":")
    is_function = colon and kind not in NO_FUNCTIONS and "/" not in function
    return function if is_function else placeless(name)


def placeless(name: Any) -> Any:
    """Return names of files and servers without the directories and hosts where they are."""
    if isinstance(name, dict):
        return {placeless(k): placeless(x) for k, x in name.items() if k not in PLACES}
    if isinstance(name, list | tuple):
        return [placeless(item) for item in name]
    if not isinstance(name, str):
        return name
    kind, colon, place = name.partition(":")
    if "://" in name:
        return urlsplit(name).path
    if colon and os.path.isabs(place) and kind == "model":
        return f"model:{Path(place).name}"
    return Path(name).name if os.path.isabs(name) else name


def environment(run: RunFiles, step: int) -> Start | None:
    """Return on what a step ran; None if it is not recorded."""
    return next((start for start in reversed(run.starts) if start.step < max(step, 1)), None)


def version_differences(a: RunFiles, b: RunFiles, step: int) -> list[str]:
    """Return the libraries that had another version in a step, in words."""
    first, second = environment(a, step), environment(b, step)
    if first is None or second is None:
        return []
    return _unlike(first.versions, second.versions, "{} {} and {}")


def first_other_version(a: RunFiles, b: RunFiles) -> tuple[int, list[str]] | None:
    """Return the steps before the versions first differ, and which they are."""
    begun = sorted({start.step for run in (a, b) for start in run.starts})
    found = ((step, version_differences(a, b, step + 1)) for step in begun)
    return next(((step, said) for step, said in found if said), None)


def source_differences(a: RunFiles, b: RunFiles, step: int) -> dict[str, str]:
    """Return the reward functions whose source was another in a step, with words about it."""
    first, second = environment(a, step), environment(b, step)
    if first is None or second is None:
        return {}
    return {
        name: f"the source of {shown_name(name)} is another"
        for name in first.rewards.keys() & second.rewards.keys()
        if first.rewards[name] != second.rewards[name]
    }


def _same_versions(a: RunFiles, b: RunFiles) -> bool:
    first, second = environment(a, 1), environment(b, 1)
    return first is not None and second is not None and first.versions == second.versions


def _unlike(first: Mapping[str, Any], second: Mapping[str, Any], form: str) -> list[str]:
    return [
        form.format(shown_name(name), *(_version(table.get(name)) for table in (first, second)))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


def _version(version: str | None) -> str:
    return "(not there)" if version is None else shown_name(str(version))
