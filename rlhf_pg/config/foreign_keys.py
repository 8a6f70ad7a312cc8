"""Keys that are not ours: those of other libraries, and those that this package had."""

import difflib
import re
from collections.abc import Iterable

# A key that this package had, and what to do in its place.
GONE = {
    **dict.fromkeys(
        ("streaming", "shuffle_buffer_size"),
        "was removed in November 2026: write what is to be trained on to a file, or name a part of "
        "it, as dataset_train_split: train[:100000]",
    ),
    "skip_zero_advantages": "was removed in November 2026: leave it out; the gradient is the same",
    "old_logprobs_source": "was removed in November 2026: leave it out; the policy computes them",
    "value_warmup_steps": "was removed in November 2026: warmup_steps is the critic's too",
    "reward_model_closes_truncated": "was removed in November 2026: leave it out; a chat turn that "
    "was cut off stays open",
    **dict.fromkeys(
        ("kl_adaptive_lr_min", "kl_adaptive_lr_max"),
        "was removed in November 2026: leave it out; the scale is from 0.1 to 10",
    ),
    "cpu_threads": "was removed in November 2026: set OMP_NUM_THREADS",
    "bfloat16_update": "was removed in November 2026: weights have float32 copies; leave it out",
    "rollout_drafts": "was removed in November 2026: leave it out; nothing is drafted any more",
    "model_check": "was removed in November 2026: every run compares sampler and policy itself",
}

_SIZES = "prompts_per_step, num_generations and num_mini_batches; all are global"
_MEMORY = "micro_batch_tokens, which never changes the result"
_ACCELERATE = "accelerate launch --config_file, with a file such as those in recipes/accelerate/"
_SERVER = "rollout_engine: vllm_server and the server's own flags"
_LENGTHS = "max_prompt_length and max_completion_length"

# A key of TRL, transformers, verl or OpenRLHF, and what to use here in a run with rewards.
FOREIGN_KEYS = {
    "per_device_train_batch_size": "prompts_per_step (global) and micro_batch_tokens (memory)",
    **dict.fromkeys(("batch_size", "train_batch_size", "mini_batch_size"), _SIZES),
    **dict.fromkeys(("gradient_accumulation_steps", "per_device_eval_batch_size"), _MEMORY),
    **dict.fromkeys(("micro_train_batch_size", "local_rollout_forward_batch_size"), _MEMORY),
    **dict.fromkeys(("generation_batch_size", "rollout_batch_size"), "prompts_per_step"),
    "steps_per_generation": "num_mini_batches",
    "ppo_mini_batch_size": "num_mini_batches: how many, not how large",
    "auto_find_batch_size": "micro_batch_tokens: auto",
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "dtype: bfloat16"),
    "gradient_checkpointing_kwargs": "gradient_checkpointing, which is never reentrant",
    "activation_offloading": "gradient_checkpointing: offload",
    "warmup_ratio": "warmup_steps",
    "lr_scheduler_kwargs": "lr_scheduler_type, or the trainer's argument optimizers",
    **dict.fromkeys(("grad_clip", "grad_norm_clip"), "max_grad_norm"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "do_eval"), "eval_steps; 0 is never"),
    "save_strategy": "save_steps; 0 is never",
    "logging_strategy": "logging_steps, for trackers; metrics.jsonl has every step",
    "load_best_model_at_end": "save_best: best/ in output_dir is the best checkpoint",
    "metric_for_best_model": "save_best, which goes by eval_reward: the higher the better",
    "logging_dir": "output_dir; TensorBoard's files are in tensorboard/ in it",
    **dict.fromkeys(("log_with", "wandb"), "report_to"),
    **dict.fromkeys(("exp_name", "experiment_name"), "run_name"),
    "hub_token": "HF_TOKEN in the environment, since config.yaml would keep a token",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _ACCELERATE),
    "use_vllm": "rollout_engine: vllm; auto takes it on a GPU where it supports the run",
    "vllm_mode": "rollout_engine: vllm (colocate) or vllm_server (server)",
    **dict.fromkeys(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url"),
    "vllm_tensor_parallel_size": _SERVER,
    "use_transformers_paged": "rollout_engine: native, which batches continuously",
    "generation_kwargs": "temperature, top_k, top_p, min_p and stop",
    "repetition_penalty": "temperature; a penalty on repetition would bias the gradient",
    **dict.fromkeys(
        ("max_new_tokens", "response_length", "generate_max_len"), "max_completion_length"
    ),
    "prompt_max_len": "max_prompt_length",
    **dict.fromkeys(("max_length", "max_seq_length"), _LENGTHS),
    **dict.fromkeys(("n_samples_per_prompt", "rloo_k"), "num_generations"),
    **dict.fromkeys(("stop_token", "stop_token_id"), "stop, which takes strings"),
    "max_tool_calling_iterations": "max_turns",
    "loss_type": "aggregation (token_mean, sequence_mean, constant) and policy_loss",
    "loss_agg_mode": "aggregation (token_mean, sequence_mean, constant)",
    "adv_estimator": "advantage_estimator",
    **dict.fromkeys(("cliprange", "clip_ratio", "eps_clip"), "epsilon"),
    "clip_ratio_high": "epsilon_high",
    **dict.fromkeys(("clip_ratio_c", "dual_clip"), "delta"),
    **dict.fromkeys(("value_clip", "vf_clip"), "cliprange_value, of PPO"),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef"), "beta"),
    "kl_penalty": "kl_estimator",
    "use_kl_loss": "kl_placement: loss",
    "use_kl_in_reward": "kl_placement: reward",
    "adap_kl_ctrl": "kl_controller: adaptive",
    "target": "kl_target",
    "horizon": "kl_horizon",
    "early_stopping": "target_kl",
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs"), "num_iterations"),
    **dict.fromkeys(("lambda", "lambd"), "lam, of PPO"),
    "critic_learning_rate": "value_learning_rate, of PPO",
    "entropy_coeff": "entropy_coef",
    "use_adaptive_entropy": "entropy_target",
    "norm_adv_by_std_in_grpo": "scale_rewards, of GRPO",
    "whiten_advantages": "normalize_advantages",
    **dict.fromkeys(("use_score_scaling", "use_score_norm"), "normalize_rewards"),
    "score_clip": "reward_clip_range",
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        "sampler_correction",
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"), "sampler_clip_max"
    ),
    "use_bias_correction_kl": "kl_estimator: k3_ratio",
    "log_completions": "log_completions_steps",
    "total_episodes": "max_steps: episodes / (prompts_per_step * num_generations)",
    **dict.fromkeys(("model_name", "sft_model_path"), "model_name_or_path"),
    "reward_model_path": "reward_model_name_or_path",
    "model_revision": 'model_init_kwargs: {"revision": "its name"}',
    "load_in_8bit": "load_in_4bit; in 8 bits a row's numbers depend on the rest of its batch",
    "dataset_text_field": 'dataset_columns: {"prompt": "its name"}',
}

# The same in a run without rewards, where other keys take their place.
SUPERVISED_KEYS = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "prompts_per_step"),
            *("train_batch_size", "mini_batch_size"),
        ),
        "batch_size, over all processes",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "micro_train_batch_size", "micro_batch_tokens"),
        "micro_batch_size, which never changes the result",
    ),
    "auto_find_batch_size": "micro_batch_size: auto",
    **dict.fromkeys(("max_seq_length", "max_prompt_length", "max_completion_length"), "max_length"),
    "dataset_text_field": 'dataset_columns: {"text": "its name"}',
    "padding_free": "packing",
}

# A key of other libraries that has no meaning here, and why.
NO_MEANING = {
    "packing": "a run with rewards never computes padding: all rows of a pass lie in one",
    "remove_unused_columns": "every column reaches the reward functions, and none the model",
    "dataloader_num_workers": "prompts are tokenised once, before the first step",
    "use_liger_kernel": "the head is computed in chunks already, and no pass holds all logits",
    "torch_compile": "shapes change at every step",
    "neftune_noise_alpha": "noise on embeddings would score another policy than the one sampled",
    "top_entropy_quantile": "every token that the policy chose is trained",
}

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
    if key in GONE:
        return f"{key!r} {GONE[key]}"
    hint, reason = FOREIGN_KEYS.get(key), NO_MEANING.get(key)
    if "batch_size" in known:  # a run without rewards
        hint = SUPERVISED_KEYS.get(key, hint)
        named = re.findall(r"\w+", hint or "")[:1]
        if named and named[0] not in (*known, "accelerate", "HF_TOKEN"):
            hint, reason = None, "it is for runs with rewards"
    if hint is not None:
        return f"{key!r} is not a key here; see {hint}"
    return None if reason is None else f"`{key}` has no meaning here: {reason}"


def nearest(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the nearest known name, or nothing if none is similar."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
