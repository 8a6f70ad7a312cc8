"""Keys and arguments of other libraries, and removed keys, with their replacements."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_origin


def _by_key(hints: Mapping[str, str]) -> dict[str, str]:
    return {key: hint for hint, keys in hints.items() for key in keys.split()}


# fmt: off
# Replacements for keys of TRL, transformers, verl and OpenRLHF; each begins with a key.
HINTS = _by_key({
    "prompts_per_step (global) and micro_batch_tokens (memory)":
        "per_device_train_batch_size gradient_accumulation_steps",
    "prompts_per_step, num_generations and num_mini_batches, which are global":
        "batch_size train_batch_size mini_batch_size generation_batch_size rollout_batch_size "
        "forward_batch_size backward_batch_size global_backward_batch_size global_batch_size "
        "local_batch_size local_mini_batch_size",
    "micro_batch_tokens, which never changes the result":
        "per_device_eval_batch_size auto_find_batch_size micro_batch_size optimize_cuda_cache "
        "local_rollout_forward_batch_size optimize_device_cache",
    "num_mini_batches: how many, not how large": "steps_per_generation ppo_mini_batch_size",
    "dtype: bfloat16": "bf16 fp16 torch_dtype", "run_name": "exp_name task_name",
    "save_best": "load_best_model_at_end push_to_hub_if_best_kwargs compare_steps",
    "gradient_checkpointing: offload": "activation_offloading", "report_to": "log_with wandb",
    "warmup_steps": "warmup_ratio", "max_grad_norm": "grad_clip", "dataset_name": "query_dataset",
    "optim": "optimizer optimizer_type", "advantage_estimator": "multi_objective_aggregation",
    "model_name_or_path": "model_name sft_model_path", "reward_clip_range: [-c, c]": "score_clip",
    "reward_model_name_or_path": "reward_model reward_model_path", "kl_target": "target",
    "normalize_rewards": "use_score_scaling use_score_norm", "kl_horizon": "horizon",
    "target_kl: a number ends a step's updates early": "early_stopping ratio_threshold",
    "stop, for strings; an EOS token always ends a completion": "stop_token stop_token_id",
    "eval_steps; 0 is never": "eval_strategy do_eval", "save_steps; 0 is never": "save_strategy",
    "log_completions_steps": "num_sample_generations",
    "rollout_engine: vllm (in this process) or vllm_server": "use_vllm vllm_mode",
    "vllm_server_base_url": "vllm_server_host vllm_server_port",
    "temperature, top_k, top_p, min_p and stop": "generation_kwargs repetition_penalty",
    "max_completion_length": "max_new_tokens response_length", "learning_rate": "lr",
    "max_prompt_length and max_completion_length": "max_length max_seq_length",
    "num_generations": "n_samples_per_prompt rloo_k", "num_iterations": "num_ppo_epochs ppo_epochs",
    "aggregation (token_mean as in DAPO, sequence_mean as in GRPO, constant), policy_loss, and for "
        "dr_grpo the preset of that name": "loss_type loss_agg_mode",
    "epsilon": "cliprange clip_range clip_eps clip_ratio eps_clip", "delta": "clip_ratio_c",
    "epsilon_high": "clip_ratio_high", "cliprange_value": "value_clip", "lam": "lambda lambd",
    "beta": "kl_coef kl_coeff init_kl_coef init_kl_coeff kl_loss_coef",
    "kl_controller: adaptive": "adap_kl_ctrl", "kl_estimator": "kl_penalty use_bias_correction_kl",
    "kl_placement: loss or reward": "use_kl_loss use_kl_in_reward",
    "scale_rewards": "norm_adv_by_std_in_grpo", "normalize_advantages": "whiten_advantages",
    "sampler_correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "sampler_clip_max": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "max_steps: episodes / (prompts_per_step * num_generations)":
        "total_episodes steps num_total_batches",
    'model_init_kwargs: {"revision": "its name"}': "model_revision",
    'dataset_columns: {"prompt": "its name"}': "dataset_text_field",
    "dataset_train_split: train[:100000] takes a part": "streaming shuffle_buffer_size",
})
# The same for runs without rewards, which have other keys.
SUPERVISED_HINTS = _by_key({
    "batch_size, over all processes": "prompts_per_step per_device_train_batch_size "
        "gradient_accumulation_steps train_batch_size mini_batch_size",
    "micro_batch_tokens, which never changes the result":
        "per_device_eval_batch_size auto_find_batch_size micro_batch_size",
    "max_length": "max_seq_length max_prompt_length max_completion_length",
    'dataset_columns: {"text": "its name"}': "dataset_text_field",
})
# Keys without a replacement: the reason, or another way.
REASONS = _by_key({
    "it was removed in November 2026 (CHANGELOG.md): leave it out":
        "skip_zero_advantages old_logprobs_source reward_model_closes_truncated kl_adaptive_lr_min "
        "kl_adaptive_lr_max bfloat16_update rollout_drafts model_check value_warmup_steps",
    "it was removed in November 2026: leave it out, and the policy loss alone trains routers":
        "router_aux_loss_coef",
    "models are decoders alone": "is_encoder_decoder",
    "an adapter that the model has is trained, and the reference is a copy of it":
        "is_peft_model model_adapter_name ref_adapter_name",
    "weights that are sharded are gathered for sampling": "ds3_gather_for_generation",
    "the trainer tokenises the prompts, once": "dataset_num_proc",
    "accelerate launch sets it": "world_size accelerator_kwargs project_kwargs",
    "set WANDB_PROJECT and the like in the environment": "tracker_kwargs tracker_project_name",
    "set OMP_NUM_THREADS in the environment": "cpu_threads",
    "set HF_TOKEN in the environment, since config.yaml would keep a token": "hub_token",
    "accelerate launch --config_file recipes/accelerate/zero3.yaml": "deepspeed fsdp fsdp_config",
    "padding is never computed": "packing padding_free",
    "a run takes the GPU if there is one, and CUDA_VISIBLE_DEVICES= in the environment hides it":
        "use_cpu no_cuda device use_mps_device",
    "a callback ends a run by trainer.stop(), see examples/early_stopping.py":
        "early_stopping_patience early_stopping_threshold",
    "models read and write text only": "image_column image_key images_column video_column",
    "every column reaches the reward functions, and none the model": "remove_unused_columns",
    "the loss already computes logits in chunks": "use_liger_kernel",
})
# fmt: on
HALF = "gradients in float16 underflow, and nothing here scales them: set bfloat16"
# Values of other libraries, and removed ones.
VALUE_REASONS = {
    ("dtype", "float16"): HALF,
    ("dtype", "fp16"): HALF,
    ("dtype", "half"): HALF,
    ("optim", "muon"): "it was removed in November 2026: choose AdamW, or give your own in Python",
}
# Sections of verl's config: mappings, where ours has none.
VERL = {"actor_rollout_ref", "algorithm", "critic", "data", "reward_model", "trainer"}
VERL |= {"custom_reward_function"}
FOREIGN_ARGUMENTS = {
    "tokenizer": "is processing_class here",
    "config": "is args here",
    "teacher_model": "is teacher_model_name_or_path here, a key of args",
    "ref_model": "is to be left out: the reference is the model as it was when training began",
    "reward_model": "is reward_funcs here, which takes reward models and functions",
    "formatting_func": "is to be left out: prompt_template, of the config, makes a prompt",
}


def configs(kind: type) -> list[Any]:
    """Return all config classes of algorithms, users' own among them, given one of them."""
    bases = [base for base in kind.__mro__ if "algorithm" in _fields(base)]
    kinds: list[Any] = bases[-1:]
    for base in kinds:
        kinds += base.__subclasses__()
    return kinds


def algorithms_with(key: str, kind: type) -> list[str]:
    """Return the algorithms whose configs have a key, given one of these."""
    algorithms = []
    for owner in configs(kind):
        fields = _fields(owner)
        if key in fields and get_origin(fields["algorithm"].type) is Literal:  # not a base class
            algorithms.append(owner.algorithm)
    return list(dict.fromkeys(algorithms))


def of_verl(keys: Iterable[str]) -> str | None:
    """Return the error for sections of verl's config, or keys of them such as data.train_files."""
    section = next((key for key in keys if key.partition(".")[0] in VERL), None)
    if section is None:
        return None
    return f"{section} is of verl's config: docs/from-verl.md has our name for each of its keys"


def _fields(kind: type) -> Mapping[str, Any]:
    return getattr(kind, "__dataclass_fields__", {})


def unknown(key: str, kind: type) -> str:
    """Return the error for an unknown key of a config, with its replacement or the nearest key."""
    known = _fields(kind)
    if "." in key and (message := of_verl([key])):
        return message
    hints = HINTS | SUPERVISED_HINTS if "batch_size" in known else HINTS
    if hint := hints.get(key):
        ours = re.split(r"\W", hint)[0]
        where = "" if ours in known else f", of {', '.join(algorithms_with(ours, kind))}"
        return f"{key!r} is not a key here; see {hint}{where}"
    if key in REASONS:
        return f"{key!r} is not a key here: {REASONS[key]}"
    if owners := algorithms_with(key, kind):
        return f"{key!r} is a key of {', '.join(owners)} alone: leave it out"
    return f"unknown key {key!r}{nearest(key, known)}"


def nearest(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "" if none is similar."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
