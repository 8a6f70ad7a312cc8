"""Keys that are not ours: those of other libraries, and those that this package had."""

import difflib
import re
from collections.abc import Iterable, Mapping


def _by_key(hints: Mapping[str, str]) -> dict[str, str]:
    return {key: hint for hint, keys in hints.items() for key in keys.split()}


# fmt: off
# What to use here in place of a key of TRL, transformers, verl or OpenRLHF, in a run with rewards.
FOREIGN_KEYS = _by_key({
    "prompts_per_step (global) and micro_batch_tokens (memory)": "per_device_train_batch_size",
    "prompts_per_step, num_generations and num_mini_batches; all are global":
        "batch_size train_batch_size mini_batch_size generation_batch_size rollout_batch_size",
    "micro_batch_tokens, which never changes the result":
        "gradient_accumulation_steps per_device_eval_batch_size micro_train_batch_size",
    "micro_batch_tokens: auto": "auto_find_batch_size",
    "num_mini_batches: how many, not how large": "steps_per_generation ppo_mini_batch_size",
    "dtype: bfloat16": "bf16 fp16 torch_dtype",
    "gradient_checkpointing": "gradient_checkpointing_kwargs activation_offloading",
    "warmup_steps": "warmup_ratio",
    "max_grad_norm": "grad_clip",
    "eval_steps; 0 is never": "eval_strategy do_eval",
    "save_steps; 0 is never": "save_strategy",
    "logging_steps, for trackers; metrics.jsonl has every step": "logging_strategy",
    "save_best: best/ in output_dir": "load_best_model_at_end metric_for_best_model",
    "report_to": "log_with wandb",
    "HF_TOKEN in the environment, since config.yaml would keep a token": "hub_token",
    "accelerate launch --config_file, with a file such as those in recipes/accelerate/":
        "deepspeed fsdp fsdp_config",
    "rollout_engine: vllm (in this process) or vllm_server": "use_vllm vllm_mode",
    "vllm_server_base_url": "vllm_server_host vllm_server_port",
    "temperature, top_k, top_p, min_p and stop": "generation_kwargs repetition_penalty",
    "max_completion_length": "max_new_tokens response_length",
    "max_prompt_length and max_completion_length": "max_length max_seq_length",
    "num_generations": "n_samples_per_prompt rloo_k",
    "aggregation (token_mean, sequence_mean, constant) and policy_loss": "loss_type loss_agg_mode",
    "advantage_estimator": "adv_estimator",
    "epsilon": "cliprange clip_ratio eps_clip",
    "epsilon_high": "clip_ratio_high",
    "delta": "clip_ratio_c",
    "cliprange_value, of PPO": "value_clip",
    "beta": "kl_coef init_kl_coef kl_loss_coef",
    "kl_estimator": "kl_penalty use_bias_correction_kl",
    "kl_placement, loss or reward": "use_kl_loss use_kl_in_reward",
    "kl_controller: adaptive": "adap_kl_ctrl",
    "num_iterations": "num_ppo_epochs ppo_epochs",
    "lam, of PPO": "lambda lambd",
    "scale_rewards, of GRPO": "norm_adv_by_std_in_grpo",
    "normalize_advantages": "whiten_advantages",
    "sampler_correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "sampler_clip_max": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "log_completions_steps": "log_completions",
    "max_steps: episodes / (prompts_per_step * num_generations)": "total_episodes",
    "model_name_or_path": "model_name sft_model_path",
    "reward_model_name_or_path": "reward_model_path",
    'model_init_kwargs: {"revision": "its name"}': "model_revision",
    "load_in_4bit": "load_in_8bit",
    'dataset_columns: {"prompt": "its name"}': "dataset_text_field",
})
# The same in a run without rewards, where other keys take their place.
SUPERVISED_KEYS = _by_key({
    "batch_size, over all processes":
        "per_device_train_batch_size gradient_accumulation_steps prompts_per_step "
        "train_batch_size mini_batch_size",
    "micro_batch_size, which never changes the result":
        "per_device_eval_batch_size micro_train_batch_size micro_batch_tokens",
    "micro_batch_size: auto": "auto_find_batch_size",
    "max_length": "max_seq_length max_prompt_length max_completion_length",
    'dataset_columns: {"text": "its name"}': "dataset_text_field",
    "packing": "padding_free",
})
# Keys with nothing in their place: why, or what else does it.
LEFT_OUT = _by_key({
    "it was removed in November 2026 (CHANGELOG.md)":
        "skip_zero_advantages old_logprobs_source reward_model_closes_truncated kl_adaptive_lr_min "
        "kl_adaptive_lr_max bfloat16_update rollout_drafts model_check",
    "dataset_train_split: train[:100000] names a part of the data": "streaming shuffle_buffer_size",
    "warmup_steps is the critic's too": "value_warmup_steps",
    "set OMP_NUM_THREADS in the environment": "cpu_threads",
    "a run with rewards never computes padding: all rows of a pass lie in one": "packing",
    "every column reaches the reward functions, and none the model": "remove_unused_columns",
    "prompts are tokenised once, before the first step": "dataloader_num_workers",
    "the head is computed in chunks already, and no pass holds all logits": "use_liger_kernel",
    "shapes change at every step": "torch_compile",
    "noise on embeddings would score another policy than the one sampled": "neftune_noise_alpha",
})
# fmt: on

# An argument of another library's trainer, and what to do here.
FOREIGN_ARGUMENTS = {
    "tokenizer": "is processing_class here",
    "config": "is args here",
    "ref_model": "is to be left out: the reference is the model as it was when training began",
    "reward_model": "is reward_funcs here, which takes reward models and functions",
    "data_collator": "is to be left out: the trainer tokenises prompts itself",
    "compute_metrics": "is to be left out: evaluation scores completions by reward_funcs",
    "formatting_func": "is to be left out: prompt_template, of the config, makes a prompt",
}


def explained(key: str, known: Iterable[str] = ()) -> str | None:
    """Explain what to use in place of a key that was ours or is another library's, or return None.

    Args:
        known: the keys of the config.
    """
    hint, reason = FOREIGN_KEYS.get(key), LEFT_OUT.get(key)
    if "batch_size" in known:  # a run without rewards
        hint = SUPERVISED_KEYS.get(key, hint)
        named = re.findall(r"\w+", hint or "")[:1]
        if named and named[0] not in (*known, "accelerate", "HF_TOKEN"):
            hint, reason = None, "it is for runs with rewards"
    if hint is not None:
        return f"{key!r} is not a key here; see {hint}"
    return None if reason is None else f"{key!r} is not a key here: {reason}"


def nearest(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the nearest known name, or nothing if none is similar."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
