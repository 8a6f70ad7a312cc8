"""Keys of other libraries, and the keys to use here in their place."""

import difflib
from collections.abc import Iterable

# A key of another library, and what to use here.
FOREIGN_KEYS = {
    "per_device_train_batch_size": "prompts_per_step (global) and micro_batch_tokens (memory)",
    "gradient_accumulation_steps": "micro_batch_tokens; it never changes the result",
    "generation_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "steps_per_generation": "num_mini_batches",
    "loss_type": "aggregation (token_mean, sequence_mean, constant) and policy_loss",
    "loss_agg_mode": "aggregation (token_mean, sequence_mean, constant)",
    "adv_estimator": "advantage_estimator",
    "use_vllm": "rollout_engine: vllm; auto takes it on a GPU where it supports the run",
    "vllm_mode": "rollout_engine: vllm (colocate) or vllm_server (server)",
    **dict.fromkeys(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url"),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "vllm_model_impl"),
        "rollout_engine: vllm_server and its flags",
    ),
    "vllm_importance_sampling_correction": "sampler_correction",
    "bf16": "dtype: bfloat16",
    "fp16": "dtype: bfloat16",
    "torch_dtype": "dtype",
    "use_kl_loss": "kl_placement: loss",
    "use_kl_in_reward": "kl_placement: reward",
    "use_bias_correction_kl": "kl_estimator: k3_ratio",
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef"), "beta"),
    **dict.fromkeys(("cliprange", "clip_ratio", "eps_clip", "ratio_clip", "pi_clip"), "epsilon"),
    "clip_ratio_high": "epsilon_high",
    **dict.fromkeys(("clip_ratio_c", "dual_clip"), "delta"),
    "vllm_importance_sampling_mode": "sampler_correction",
    "vllm_importance_sampling_clip_max": "sampler_clip_max",
    "vllm_importance_sampling_clip_min": "sampler_clip_min",
    **dict.fromkeys(("value_clip", "vf_clip"), "cliprange_value, of PPO"),
    "clip_predicted_values": "cliprange_value, of PPO; null does not clip",
    "value_loss_scale": "vf_coef, of PPO",
    **dict.fromkeys(
        ("value_preprocessor", "value_preprocessor_kwargs"), "normalize_values, of PPO"
    ),
    "critic_learning_rate": "value_learning_rate, of PPO",
    **dict.fromkeys(("entropy_loss_scale", "entropy_coeff"), "entropy_coef"),
    "use_adaptive_entropy": "entropy_target",
    "norm_adv_by_std_in_grpo": "scale_rewards, of GRPO",
    **dict.fromkeys(("lambda", "lambd", "lamb"), "lam, of PPO"),
    "discount_factor": "gamma, of PPO and REINFORCE",
    "whiten_advantages": "normalize_advantages",
    **dict.fromkeys(
        ("num_ppo_epochs", "ppo_epochs", "learning_epochs", "n_epochs"), "num_iterations"
    ),
    "mini_batches": "num_mini_batches",
    "ppo_mini_batch_size": "num_mini_batches: how many, not how large",
    "rollouts": "prompts_per_step and num_generations: every completion is a whole episode",
    "num_envs": "prompts_per_step and num_generations: every completion is a whole episode",
    "sequence_length": "max_prompt_length and max_completion_length",
    **dict.fromkeys(
        ("response_length", "max_new_tokens", "generate_max_len"), "max_completion_length"
    ),
    "prompt_max_len": "max_prompt_length",
    **dict.fromkeys(("rloo_k", "n_samples_per_prompt"), "num_generations"),
    **dict.fromkeys(("grad_norm_clip", "grad_clip"), "max_grad_norm"),
    "warmup_ratio": "warmup_steps",
    "learning_rate_scheduler": "lr_scheduler_type, or kl_adaptive_lr for one that goes by the KL",
    "learning_rate_scheduler_kwargs": "lr_scheduler_type, whose only number is warmup_steps",
    **dict.fromkeys(("kl_threshold", "tgt_KL"), "target_kl, which stops at 1.5 times its value"),
    "rewards_shaper": "reward_weights, or let the reward function return the shaped reward",
    "time_limit_bootstrap": "bootstrap_truncated, of PPO",
    "experiment": "output_dir, run_name, report_to and save_steps",
    "directory": "output_dir",
    "experiment_name": "run_name",
    "checkpoint_interval": "save_steps",
    "store_separately": "save_steps; a checkpoint is one directory with all that resuming needs",
    "wandb": "report_to: wandb",
    "wandb_kwargs": "run_name; the rest is read from W&B's own environment variables",
    "write_interval": "logging_steps, for trackers; metrics.jsonl has a line for every step",
    "repetition_penalty": "temperature; the policy that trains has no penalty on repetition, "
    "and sampling with one would bias the gradient",
}

# A key of other RL libraries, and why it has no meaning here.
NO_MEANING = {
    "random_timesteps": "random tokens are not language, and a sampled policy explores anyway",
    "learning_starts": "a policy gradient learns from the newest rollout; it fills no buffer first",
    **dict.fromkeys(
        (
            *("state_preprocessor", "state_preprocessor_kwargs"),
            *("observation_preprocessor", "observation_preprocessor_kwargs"),
        ),
        "a state is a list of token ids, which have no scale to normalise",
    ),
    **dict.fromkeys(
        ("rnn", "lstm", "gru", "recurrent"),
        "a transformer remembers by its context, and carries no hidden state between updates",
    ),
    **dict.fromkeys(
        ("observation_space", "action_space"), "the tokenizer says what states and actions are"
    ),
}


def explained(key: str) -> str | None:
    """Explain what to use in place of another library's key; return None for any other key."""
    if key in FOREIGN_KEYS:
        return f"{key!r} is not a key here; see {FOREIGN_KEYS[key]}"
    if key in NO_MEANING:
        return f"`{key}` has no meaning for a language model: {NO_MEANING[key]}"
    return None


def nearest(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the nearest known name, or nothing if none is similar."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
