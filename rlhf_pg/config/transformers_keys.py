"""Keys of transformers' `TrainingArguments`, and what takes their place here."""

_ACCELERATE = (
    "accelerate launch --config_file, with a file such as those in recipes/accelerate/ (where the "
    "package is installed, rlhf_pg/recipes/accelerate/)"
)
_STEPS = "a number of steps; 0 is never"
_TEXTS = "texts are tokenised once, before the first step, and no batch is assembled ahead"
_BY_REWARD = "save_best, which goes by eval_reward: the higher the better"

# A key of transformers, and what to use here.
TRANSFORMERS_KEYS = {
    "per_device_train_batch_size": "prompts_per_step (global) and micro_batch_tokens (memory)",
    "per_gpu_train_batch_size": "prompts_per_step (global) and micro_batch_tokens (memory)",
    **dict.fromkeys(
        ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps"),
        "micro_batch_tokens; it never changes the result",
    ),
    "gradient_accumulation_steps": "micro_batch_tokens; it never changes the result",
    "auto_find_batch_size": "micro_batch_tokens: auto",
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpointing_kwargs"), "gradient_checkpointing"
    ),
    "gradient_checkpointing_kwargs": "gradient_checkpointing, which is never reentrant",
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), "dtype: bfloat16"),
    "half_precision_backend": "dtype: bfloat16",
    "torch_dtype": "dtype",
    "tf32": "dtype; torch.set_float32_matmul_precision chooses TF32 for float32",
    "data_seed": "seed",
    "full_determinism": "seed, the one thing that the noise of sampling depends on",
    "warmup_ratio": "warmup_steps",
    "lr_scheduler_kwargs": "lr_scheduler_type, or the trainer's argument optimizers",
    **dict.fromkeys(
        ("optim_args", "optim_target_modules"), "optim, or the trainer's argument optimizers"
    ),
    "adafactor": "optim, or the trainer's argument optimizers",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), f"eval_steps: {_STEPS}"),
    "do_eval": f"eval_steps: {_STEPS}",
    "eval_delay": "eval_steps, or call trainer.evaluate()",
    "eval_on_start": "eval_steps, or call trainer.evaluate() before trainer.train()",
    "do_predict": "eval_steps, or call trainer.evaluate(dataset)",
    "save_strategy": f"save_steps: {_STEPS}, and save_best keeps the best",
    "save_only_model": "save_steps: 0; final/ holds the model and no optimizer",
    "load_best_model_at_end": "save_best: best/ in output_dir is the best checkpoint",
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), _BY_REWARD),
    "enable_jit_checkpoint": "save_steps; SIGTERM saves a checkpoint after its step anyway",
    "overwrite_output_dir": "output_dir: what a run without checkpoints left is moved aside",
    "logging_strategy": "logging_steps; metrics.jsonl has every step",
    "logging_first_step": "logging_steps; metrics.jsonl has every step",
    "logging_dir": "output_dir; TensorBoard's files are in tensorboard/ in it",
    "project": "report_to; W&B's project is read from WANDB_PROJECT",
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "report_to: trackio; the rest is read from trackio's own environment variables",
    ),
    "include_num_input_tokens_seen": "metrics.jsonl, whose num_tokens counts them",
    "include_tokens_per_second": "metrics.jsonl, which has perf/tokens_per_second",
    "skip_memory_metrics": "rlhf-pg plan, which estimates the memory by part",
    **dict.fromkeys(("log_level", "log_level_replica"), "Python's logging, by the name rlhf_pg"),
    "hub_strategy": "push_to_hub, which uploads final/ once, when it is whole",
    "hub_always_push": "push_to_hub, which uploads final/ once, when it is whole",
    "hub_revision": "push_to_hub, which uploads to the main branch",
    **dict.fromkeys(
        ("hub_token", "push_to_hub_token"),
        "HF_TOKEN or `hf auth login`: config.yaml would publish a token that is a key",
    ),
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id: organization/name",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerator_config"), _ACCELERATE),
    **dict.fromkeys(("parallelism_config", "fsdp_transformer_layer_cls_to_wrap"), _ACCELERATE),
    "fsdp_min_num_params": _ACCELERATE,
    **dict.fromkeys(("use_cpu", "no_cuda"), "CUDA_VISIBLE_DEVICES, empty for the CPU"),
    **dict.fromkeys(
        ("train_sampling_strategy", "group_by_length"),
        "shuffle_dataset; padding is never computed, so that lengths need no order",
    ),
    "label_smoothing_factor": "label_smoothing, of SFTConfig",
    "torch_empty_cache_steps": "micro_batch_tokens, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    "debug": "max_skipped_steps: a step with numbers that are not finite is kept in skipped/",
}

# A key of transformers that has no meaning here, and why.
TRANSFORMERS_NO_MEANING = {
    "do_train": "trainer.train() trains",
    "local_rank": "the launcher tells each process its rank",
    "average_tokens_across_devices": "tokens are always counted over all processes",
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
            *("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
            *("dataloader_prefetch_factor", "length_column_name", "dispatch_batches"),
        ),
        _TEXTS,
    ),
    **dict.fromkeys(
        (
            *("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph"),
            "ddp_find_unused_parameters",
        ),
        "DDP is set up as the models need it",
    ),
    **dict.fromkeys(
        (
            *("batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object"),
            *("include_for_metrics", "include_inputs_for_metrics", "prediction_loss_only"),
            "label_names",
        ),
        "evaluation samples completions and scores them with the rewards; it has no labels",
    ),
    "disable_tqdm": "a bar is shown in a terminal, and elsewhere about twenty lines",
    "ignore_data_skip": "a resumed run goes on at its next prompt without reading earlier ones",
    "remove_unused_columns": "every column reaches the reward functions, and none the model",
    "logging_nan_inf_filter": "numbers are reported as they are; see max_skipped_steps",
    **dict.fromkeys(
        ("log_on_each_node", "save_on_each_node"),
        "the first process reports and saves, into the output_dir that all share",
    ),
    "save_safetensors": "weights are always saved as safetensors",
    "restore_callback_states_from_checkpoint": "callbacks keep no state in a checkpoint",
    "neftune_noise_alpha": "noise on embeddings would score another policy than the one that "
    "samples",
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "the head is computed in chunks already, and no pass holds all logits",
    ),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        "shapes change at every step; on a GPU the native engine compiles what repeats",
    ),
    "jit_mode_eval": "sampling needs no traced model",
    "use_cache": "rollouts keep keys and values, and training has no use for them",
    **dict.fromkeys(
        ("use_mps_device", "tpu_num_cores", "tpu_metrics_debug", "use_ipex"),
        "a run is on NVIDIA's GPUs or on CPUs",
    ),
    "fp16_opt_level": "it is Apex's; dtype is the precision",
}
