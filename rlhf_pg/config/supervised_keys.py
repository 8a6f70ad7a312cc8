"""Keys of TRL and transformers in configs without rollouts, where others take their place."""

_ADAMW = "the optimizer is AdamW; learning_rate and weight_decay are its keys"
_ONE_CHECKPOINT = (
    "final/ is the model after the last step, and metrics.jsonl says how it came there"
)
_UPLOAD = "nothing is uploaded; `hf upload` takes final/"
_EVALUATION = "the numbers on held-out data are chosen by the kind of run"
_PASS = "the forward pass is the model's own"
REWARDED = "it is for runs with rewards"

# A key of another library, or of runs with rollouts, and what to use here.
SUPERVISED_KEYS = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "per_gpu_train_batch_size", "global_batch_size"),
            *("gradient_accumulation_steps", "mini_batch_size", "prompts_per_step"),
        ),
        "batch_size, over all processes",
    ),
    **dict.fromkeys(
        (
            *("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps"),
            *("local_batch_size", "micro_batch_tokens"),
        ),
        "micro_batch_size; it never changes the result",
    ),
    "auto_find_batch_size": "micro_batch_size: auto",
    **dict.fromkeys(
        ("max_seq_length", "sequence_length", "max_prompt_length", "max_completion_length"),
        "max_length",
    ),
    **dict.fromkeys(("truncation_mode", "long_prompts"), "long_examples"),
    "dataset_text_field": 'dataset_columns: {"text": "its name"}',
    **dict.fromkeys(("packing_strategy", "padding_free"), "packing"),
    "eval_packing": "packing, which is of training data; held-out data are padded",
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), "load_in_4bit"
    ),
    "label_smoothing_factor": "label_smoothing",
    "full_determinism": "seed",
    "bfloat16_update": "dtype: bfloat16, under which trained weights stay in float32",
    **dict.fromkeys(
        ("lr_scheduler_kwargs", "learning_rate_scheduler", "learning_rate_scheduler_kwargs"),
        "lr_scheduler_type, whose only number is warmup_steps",
    ),
    "total_episodes": "max_steps: examples / batch_size",
    **dict.fromkeys(
        ("eval_delay", "eval_on_start", "do_predict"),
        "eval_steps; the last evaluation is after the last step",
    ),
    "save_strategy": "save_steps: a number of steps; 0 is never",
    "enable_jit_checkpoint": "save_steps",
    "overwrite_output_dir": "output_dir: what an earlier run left in it is set aside",
    **dict.fromkeys(
        ("logging_strategy", "logging_first_step", "write_interval"),
        "logging_steps, of metrics.jsonl and of trackers",
    ),
    "logging_dir": "report_to; TensorBoard's files are where transformers puts them",
}

# A key of another library, or of runs with rollouts, that has no meaning here, and why.
SUPERVISED_NO_MEANING = {
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_best"),
        _ONE_CHECKPOINT,
    ),
    "compare_steps": _ONE_CHECKPOINT,
    **dict.fromkeys(
        (
            *("optim", "optim_args", "optim_target_modules", "adafactor"),
            *("adam_beta1", "adam_beta2", "adam_epsilon"),
        ),
        _ADAMW,
    ),
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_token"),
            *("hub_always_push", "hub_revision", "push_to_hub_token", "push_to_hub_model_id"),
            *("push_to_hub_organization", "push_to_hub_if_best_kwargs"),
        ),
        _UPLOAD,
    ),
    **dict.fromkeys(
        (
            *("batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object"),
            *("include_for_metrics", "include_inputs_for_metrics", "prediction_loss_only"),
            "label_names",
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(
        (
            *("use_liger_kernel", "liger_kernel_config", "torch_compile", "use_cache"),
            *("torch_compile_backend", "torch_compile_mode", "jit_mode_eval"),
            *("neftune_noise_alpha", "cast_lm_head_to_fp32"),
        ),
        _PASS,
    ),
    **dict.fromkeys(
        ("packing", "packing_strategy", "eval_packing", "padding_free", "pad_to_multiple_of"),
        "texts are padded to the longest of their micro-batch",
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "label_smoothing_factor"),
        "a reward model learns from scores of whole texts",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "group_by_length", "shuffle_dataset"),
        "examples are shuffled anew in every epoch",
    ),
    "loss_type": "the loss is the cross-entropy of tokens, or of preferences",
    "remove_unused_columns": "columns that make no example are not read",
    "ignore_data_skip": "a resumed run goes on at its next example",
    "logging_nan_inf_filter": "numbers are reported as they are",
    **dict.fromkeys(("dataset_num_proc", "dataset_kwargs"), "rows are tokenised as they come"),
    "log_multimodal": "examples are text",
    "ddp_timeout": "it is the launcher's own",
    "router_aux_loss_coef": "the model's own config weighs the loss of its router",
    **dict.fromkeys(
        (
            *("multi_objective_aggregation", "top_entropy_quantile", "model_adapter_name"),
            *("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
            "ref_adapter_name",
        ),
        REWARDED,
    ),
}
