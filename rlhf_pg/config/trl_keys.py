"""Keys and arguments of TRL, and what takes their place here.

Those that TRL inherits from transformers are in `transformers_keys`.
"""

_VLLM_SERVER = "rollout_engine: vllm_server and its flags"
_NATIVE = "rollout_engine: native, which batches continuously"
_SHAPED = "reward_funcs: a reward of your own in Python, or "
_TOKENIZER = "the trainer's argument processing_class, a tokenizer that has it"
_LORA = "the trainer's argument peft_config, a LoraConfig that has it"
_BNB = "the trainer's argument quantization_config, a BitsAndBytesConfig that has it"
_SIZES = "prompts_per_step, num_generations and num_mini_batches; all are global"

# A key of TRL, and what to use here.
TRL_KEYS = {
    "generation_batch_size": "prompts_per_step",
    "steps_per_generation": "num_mini_batches",
    "loss_type": "aggregation (token_mean, sequence_mean, constant) and policy_loss",
    "use_vllm": "rollout_engine: vllm; auto takes it on a GPU where it supports the run",
    "vllm_mode": "rollout_engine: vllm (colocate) or vllm_server (server)",
    **dict.fromkeys(("vllm_server_host", "vllm_server_port"), "vllm_server_base_url"),
    "vllm_group_port": "vllm_sync_directory, through which the server gets new weights",
    **dict.fromkeys(("vllm_tensor_parallel_size", "vllm_model_impl"), _VLLM_SERVER),
    "vllm_structured_outputs_regex": "reward_funcs, which may reward a format; a constraint on "
    "what is sampled would bias the gradient",
    **dict.fromkeys(
        (
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
        ),
        _NATIVE,
    ),
    "cache_implementation": "rollout_engine: native, which has a cache of its own",
    "ds3_gather_for_generation": "rollout_engine: weights are gathered for one in the process, and "
    "handed to a vllm_server",
    "generation_kwargs": "temperature, top_k, top_p, min_p and stop",
    "repetition_penalty": "temperature; the policy that trains has no penalty on repetition, "
    "and sampling with one would bias the gradient",
    "vllm_importance_sampling_correction": "sampler_correction",
    "vllm_importance_sampling_mode": "sampler_correction",
    "vllm_importance_sampling_clip_max": "sampler_clip_max",
    "vllm_importance_sampling_clip_min": "sampler_clip_min",
    "vllm_importance_sampling_cap": "sampler_clip_max",
    "off_policy_mask_threshold": "sampler_correction: sequence_mask, which goes by the ratio",
    "use_bias_correction_kl": "kl_estimator: k3_ratio",
    "use_adaptive_entropy": "entropy_target",
    "max_tool_calling_iterations": "max_turns",
    "log_completions": "log_completions_steps",
    "log_unique_prompts": "num_completions_to_print",
    "log_completions_hub_repo": "log_completions_steps; samples are in completions.jsonl",
    "max_length": "max_prompt_length and max_completion_length",
    "max_seq_length": "max_prompt_length and max_completion_length",
    "truncation_mode": "long_prompts: error or drop; a prompt is never cut",
    "dataset_text_field": 'dataset_columns: {"prompt": "its name"}',
    "dataset_streaming": "streaming",
    "chat_template_path": _TOKENIZER,
    "eos_token": _TOKENIZER,
    "activation_offloading": "gradient_checkpointing: offload",
    "cast_lm_head_to_fp32": "dtype; log-probabilities are in float32 at least",
    "model_revision": 'model_init_kwargs: {"revision": "its name"}',
    **dict.fromkeys(
        (
            *("lora_target_parameters", "lora_modules_to_save", "lora_task_type"),
            *("use_rslora", "use_dora"),
        ),
        _LORA,
    ),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), _BNB
    ),
    "load_in_8bit": "load_in_4bit; in 8 bits a row's numbers depend on the rest of its batch",
    # The PPO that TRL had until September 2026, and the one before it.
    **dict.fromkeys(("kl_coef", "init_kl_coef"), "beta"),
    "cliprange": "epsilon",
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs"), "num_iterations"),
    "response_length": "max_completion_length",
    "total_episodes": "max_steps: episodes / (prompts_per_step * num_generations)",
    **dict.fromkeys(("num_total_batches", "steps"), "max_steps"),
    "local_rollout_forward_batch_size": "micro_batch_tokens; it never changes the result",
    "forward_batch_size": "micro_batch_tokens; it never changes the result",
    "num_sample_generations": "log_completions_steps",
    "stop_token": "stop; an EOS of the model always ends a completion",
    "stop_token_id": "stop, which takes strings; an EOS of the model always ends a completion",
    "sft_model_path": "model_name_or_path",
    "model_name": "model_name_or_path",
    "reward_model_path": "reward_model_name_or_path",
    **dict.fromkeys(
        ("batch_size", "mini_batch_size", "backward_batch_size", "global_batch_size"), _SIZES
    ),
    **dict.fromkeys(
        (
            *("local_batch_size", "micro_batch_size", "local_mini_batch_size"),
            "global_backward_batch_size",
        ),
        _SIZES,
    ),
    **dict.fromkeys(("exp_name", "task_name"), "run_name"),
    "log_with": "report_to",
    "tracker_kwargs": "report_to; the rest is read from the tracker's own environment variables",
    "tracker_project_name": "report_to; W&B's project is read from WANDB_PROJECT",
    "push_to_hub_if_best_kwargs": "push_to_hub, hub_model_id and hub_private_repo",
    **dict.fromkeys(("accelerator_kwargs", "project_kwargs"), "accelerate launch and its flags"),
    "query_dataset": "dataset_name",
    "adap_kl_ctrl": "kl_controller: adaptive",
    "kl_penalty": "kl_estimator",
    "target": "kl_target",
    "horizon": "kl_horizon",
    "early_stopping": "target_kl",
    "compare_steps": "save_best, with eval_steps",
    "ratio_threshold": "delta, which bounds a large ratio instead of skipping its batch",
    **dict.fromkeys(("use_score_scaling", "use_score_norm"), "normalize_rewards"),
    "score_clip": "reward_clip_range",
    "rloo_k": "num_generations",
    "token_level_kl": "kl_placement: reward, which pays the KL token by token",
    "normalize_reward": "normalize_rewards",
    "normalize_advantage": "normalize_advantages",
    "reward_shaping_enable_length": f"{_SHAPED}overlong_buffer",
    "reward_shaping_length_coef": f"{_SHAPED}overlong_buffer",
    **dict.fromkeys(
        (
            "reward_shaping_enable_repetition",
            "reward_shaping_repetition_coef",
            "reward_shaping_repetition_ngram",
        ),
        "reward_funcs: a reward of your own in Python",
    ),
    **dict.fromkeys(
        (
            *("reward_shaping_enable_eos", "reward_shaping_eos_bonus"),
            *("reward_shaping_eos_missing_penalty", "reward_shaping_eos_out_of_range_penalty"),
            *("reward_shaping_eos_min_len", "reward_shaping_eos_max_len"),
        ),
        f"{_SHAPED}missing_eos_penalty",
    ),
}

# A key of TRL that has no meaning here, and why.
TRL_NO_MEANING = {
    **dict.fromkeys(
        ("packing", "packing_strategy", "eval_packing", "padding_free", "pad_to_multiple_of"),
        "a run with rewards never computes padding: all rows of a pass lie in one",
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        "only tokens that the policy chose enter a loss on rewards",
    ),
    "center_rewards_coefficient": "it is for training a reward model",
    **dict.fromkeys(("dataset_num_proc", "dataset_kwargs"), "prompts are tokenised as they come"),
    "ignore_bias_buffers": "buffers are never averaged between processes",
    "log_multimodal": "prompts are text",
    "multi_objective_aggregation": "scores are summed by reward_weights before they are compared; "
    "normalize_rewards scales each source by itself",
    "top_entropy_quantile": "every token that the policy chose is trained; an advantage estimator "
    "of your own can set the others to 0",
    **dict.fromkeys(
        ("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
        "they are of the loss vespo, which is not among the policy losses (see policy_loss)",
    ),
    "world_size": "the launcher sets the number of processes, which changes no result",
    **dict.fromkeys(
        ("model_adapter_name", "ref_adapter_name"),
        "the reference is the adapter as it was when training began",
    ),
    "is_encoder_decoder": "a policy is a causal language model",
    "is_peft_model": "a model with an adapter is known by itself",
    **dict.fromkeys(
        ("optimize_device_cache", "optimize_cuda_cache"), "memory is freed as it is no longer used"
    ),
}

# An argument of a trainer of TRL or transformers, and what to do here.
TRAINER_ARGUMENTS = {
    "tokenizer": "is processing_class here",
    "config": "is args here",
    "dataset": "is train_dataset here",
    "policy": "is model here",
    "policy_model": "is model here",
    "ref_model": "is to be left out: the reference is the model as it was when training began, and "
    "beta 0 keeps none",
    "ref_policy": "is to be left out: the reference is the model as it was when training began",
    "reward_model": "is reward_funcs here, which takes reward models and functions",
    "reward_function": "is reward_funcs here",
    "reward_functions": "is reward_funcs here",
    "value_model": "is of PPOTrainer: no other algorithm has a critic",
    "num_shared_layers": "is to be left out: critic: shared puts a head on the policy's trunk",
    "data_collator": "is to be left out: the trainer tokenises prompts itself",
    "training_data_collator": "is to be left out: the trainer tokenises prompts itself",
    "compute_metrics": "is to be left out: evaluation scores completions by reward_funcs, and a "
    "callback may add numbers of its own",
    "compute_loss_func": "is to be left out: policy_loss names the loss; a subclass has its own",
    "preprocess_logits_for_metrics": "is to be left out: evaluation keeps no logits",
    "formatting_func": "is to be left out: prompt_template, of the config, makes a prompt",
    "model_init": "is model here, the model itself",
    "model_init_kwargs": "is a key of the config: args=...Config(model_init_kwargs=...)",
    "optimizer": "is optimizers=(optimizer, None) here",
    "lr_scheduler": "is optimizers=(optimizer, scheduler) here",
    "optimizer_cls_and_kwargs": "is optimizers=(optimizer, None) here, an optimizer that is made",
    "peft_module_casting_to_bf16": "is to be left out: dtype: bfloat16",
    "dataset_text_field": "is to be left out: dataset_columns, of the config, renames columns",
    "max_seq_length": "is to be left out: max_prompt_length and max_completion_length, of the "
    "config",
    "packing": "is to be left out: padding is never computed",
}
