"""Rules on which keys go together: those that would be ignored or wrong are refused by name.

A rule yields a message for everything that breaks it; all of them are told at once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.config.fields import ConfigError, is_set, parameters
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.run import SCHEDULES

EMBEDDED = ("arithmetic", "preference", "guess", "calculator")
THIRD_PARTY = ("reasoning_gym", "verifiers", "openenv")  # before a colon and a name
Rule = Callable[[Any], Iterator[str]]

# Arguments of from_pretrained that are keys or arguments of their own, or that would break a run.
_DEVICES = "leave it out, since the launcher chooses devices"
OWN_KEYS = {
    **{key: f"set {key}" for key in ("attn_implementation", "trust_remote_code", "dtype")},
    "torch_dtype": "set dtype",
    "quantization_config": "give quantization_config to the trainer, or set load_in_4bit",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "set load_in_4bit"),
    **dict.fromkeys(("token", "use_auth_token"), "set HF_TOKEN: config.yaml would keep a token"),
    **dict.fromkeys(("device_map", "max_memory", "tp_plan", "device_mesh"), _DEVICES),
    "output_loading_info": "leave it out",
    "config": "name the fields of the config that are to change",
    "state_dict": "give the trainer the model itself",
    "weights_only": "leave it out, since weights are never unpickled",
    **dict.fromkeys(("allow_all_kernels", "kernel_config"), "leave it out, and set use_kernels"),
}


def check(args: Any, rules: Sequence[Rule]) -> None:
    """Refuse keys that do not go together.

    Raises:
        ValueError: there is a line for each rule that is broken; it names the keys and says what
            to change.
    """
    messages = [message for rule in rules for message in rule(args)]
    if messages:
        raise ConfigError([(message.partition(" ")[0], message) for message in messages])


def registry(key: str) -> dict[str, Any]:
    """Return the functions that a key chooses from by name, those of users among them."""
    # They need torch, which takes seconds: `--help` does without.
    from rlhf_pg.advantages import ADVANTAGES
    from rlhf_pg.losses import POLICY_LOSSES

    found: dict[str, Any] = ADVANTAGES if key == "advantage_estimator" else POLICY_LOSSES
    return found


def options_of(key: str, name: str) -> set[str]:
    """Return the names of the parameters of a function in a registry."""
    return parameters(registry(key)[name])


def idle(args: Any, keys: str, used: bool, why: str) -> Iterator[str]:
    """Yield that keys were set which would be ignored."""
    yield from (f"{key} {why}" for key in keys.split() if not used and is_set(args, key))


def of_model(args: Any) -> Iterator[str]:
    for key in args.model_init_kwargs.keys() & OWN_KEYS:
        yield f"model_init_kwargs must not have {key!r}: {OWN_KEYS[key]}"
    runs_code = {
        "attn_implementation": "/" in (args.attn_implementation or ""),
        "use_kernels, of model_init_kwargs,": bool(args.model_init_kwargs.get("use_kernels")),
    }
    for key, runs in runs_code.items():
        if runs and not args.trust_remote_code:
            yield (
                f"{key} runs kernels of the Hub, which are code: set trust_remote_code to true, "
                "or leave it out"
            )
    lora = "lora_r lora_alpha lora_dropout lora_target_modules"
    yield from idle(args, lora, args.use_peft, "is for LoRA: set use_peft to true, or leave it out")
    if args.lora_dropout and args.disable_dropout:
        yield "lora_dropout needs disable_dropout: false, which keeps it"
    if args.max_steps == 0:
        yield "max_steps must be at least 1, or -1 to go by num_train_epochs, got 0"
    if args.lr_scheduler_type not in SCHEDULES:
        yield _not_one_of(args, "lr_scheduler_type", SCHEDULES)


def of_data(args: Any) -> Iterator[str]:
    if args.task is None:
        yield from idle(args, "task_options", False, "is for a task: set task, or leave it out")
    else:
        source, colon, name = args.task.partition(":")
        if not (args.task in EMBEDDED or (colon and name and source in THIRD_PARTY)):
            yield _not_one_of(args, "task", [*EMBEDDED, *(f"{one}:NAME" for one in THIRD_PARTY)])
        if args.dataset_name:
            yield (
                f"task {args.task!r} brings data of its own, and dataset_name names other data: "
                "leave one of them out"
            )
        if args.task in EMBEDDED and args.task_options:
            yield f"task_options is for third-party tasks, and {args.task} has none"
    for key in ("dataset_name", "eval_dataset_name"):
        if "" in getattr(args, key):
            yield f"{key} must name a file, a folder or a Hub id, got ''"
    weights, names = args.dataset_weights, args.dataset_name
    if weights is not None and (len(weights) != len(names) or min(weights, default=0) <= 0):
        yield (
            f"dataset_weights must have one number above 0 for each of the {len(names)} datasets "
            f"of dataset_name, got {weights}"
        )
    why = "is for datasets by name: set dataset_name, or leave it out"
    yield from idle(args, "dataset_train_split", bool(names), why)
    of_all = "dataset_config dataset_test_split dataset_columns"
    yield from idle(args, of_all, bool(names + args.eval_dataset_name), why)
    if isinstance(args.dataset_test_split, float) and args.eval_dataset_name:
        yield (
            "dataset_test_split as a share splits dataset_name, and eval_dataset_name names other "
            "data: leave one of them out"
        )
    for ours, theirs in args.dataset_columns.items():
        if not isinstance(theirs, str):
            yield f"dataset_columns must map names to names, got {theirs!r} for {ours!r}"


def of_run(args: Any) -> Iterator[str]:
    if args.num_mini_batches > args.prompts_per_step:
        yield (
            f"num_mini_batches must be at most prompts_per_step ({args.prompts_per_step}), since "
            f"a minibatch is whole groups, got {args.num_mini_batches}"
        )
    if args.optim == "adamw_8bit" and args.dtype == "float64":
        yield "optim adamw_8bit updates no float64 weights: change dtype or optim"


def of_sampling(args: Any) -> Iterator[str]:
    if "" in (args.stop or ()):
        yield "stop must not hold an empty string, which would end every completion at once"
    cuts = {"top_k": args.top_k > 0, "top_p": args.top_p < 1, "min_p": args.min_p > 0}
    for key, truncates in cuts.items():
        if truncates and args.truncated_sampling == "refuse":
            yield (
                f"{key} {getattr(args, key)} leaves tokens out of what is sampled, and the "
                f'gradient would be biased: leave {key} out, or set truncated_sampling to "ignore"'
            )
    of_server = "vllm_sync_directory vllm_server_base_url vllm_server_timeout"
    in_process = "vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_max_model_length"
    engines = {"native": "rollout_cache_tokens", "vllm": in_process, "vllm_server": of_server}
    for engine, keys in engines.items():
        chosen = args.rollout_engine
        used = chosen == engine or (chosen == "auto" and engine != "vllm_server")
        why = f"has no effect without rollout_engine {engine}: set that, or leave it out"
        yield from idle(args, keys, used, why)
    url = args.vllm_server_base_url
    if {"@", "?", "#"} & set(url):
        yield (
            "vllm_server_base_url holds a user, a password or a query, which would be saved with "
            "the config: leave it out, and let a proxy on this machine add it"
        )
    elif not url.startswith(("http://", "https://")):
        yield f"vllm_server_base_url must begin with http:// or https://, got {quoted(url)!r}"


def of_rewards(args: Any) -> Iterator[str]:
    bounds = args.reward_clip_range
    if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        yield f"reward_clip_range must be a lower and a higher number, got {bounds}"
    if args.reward_squash != "none" and args.normalize_rewards:
        yield "reward_squash and normalize_rewards both set the scale of a score: leave one out"
    if (args.overlong_buffer or 0) > args.max_completion_length:
        yield (
            f"overlong_buffer must be at most max_completion_length ({args.max_completion_length}),"
            f" whose last tokens it is, got {args.overlong_buffer}"
        )


def of_names(args: Any) -> Iterator[str]:
    for key in ("advantage_estimator", "policy_loss"):
        if getattr(args, key) not in registry(key):
            yield _not_one_of(args, key, list(registry(key)))


def of_estimator(args: Any) -> Iterator[str]:
    from rlhf_pg.advantages import IN_BATCH, IN_GROUP, NEED_VALUES, PER_TOKEN

    name = args.advantage_estimator
    if args.has_critic and name not in NEED_VALUES:
        yield (
            f"advantage_estimator {name!r} makes no use of the critic that PPO trains: choose "
            f"{', '.join(sorted(NEED_VALUES))}, or another algorithm"
        )
    if name in NEED_VALUES and not args.has_critic:
        yield f"advantage_estimator {name!r} needs a critic: only PPO has one"
    compared = args.num_generations * (args.prompts_per_step if name in IN_BATCH else 1)
    if compared < 2 and name in IN_GROUP | IN_BATCH:
        yield (
            f"advantage_estimator {name!r} compares completions: raise num_generations (or "
            "prompts_per_step, for one that compares over the batch)"
        )
    if name == "process_group_normalized" and args.beta > 0 and args.kl_placement == "reward":
        yield (
            f"advantage_estimator {name!r} looks at the steps alone and would lose the KL: set "
            'kl_placement to "loss"'
        )
    # These use the rewards of tokens, not the scores of completions.
    if args.whiten_rewards and name not in {"returns", "total_returns", *NEED_VALUES}:
        yield (
            f"whiten_rewards rescales what each token is paid, and advantage_estimator {name!r} "
            'looks at the scores of completions: choose "returns" or one with a critic, or leave '
            "it out"
        )
    if args.importance_sampling_level == "sequence" and name in PER_TOKEN:
        yield (
            "importance_sampling_level 'sequence' takes one advantage per completion, and "
            f"advantage_estimator {name!r} gives one per token: use group_normalized or "
            "leave_one_out"
        )
    if args.dynamic_sampling_rounds and name == "process_group_normalized":
        yield (
            "dynamic_sampling_rounds sets groups of equal total scores aside, whose steps may "
            f"differ: leave it out, or choose another advantage_estimator than {name}"
        )
    if args.dynamic_sampling_rounds and args.num_generations < 2:
        yield (
            "dynamic_sampling_rounds samples again where all scores of a group are equal: raise "
            "num_generations, or leave it out"
        )


def of_updates(args: Any) -> Iterator[str]:
    """What depends on the number of updates per rollout, and on ranges that depend on keys."""
    if args.policy_loss == "vanilla" and args.updates_per_step > 1:
        yield (
            'policy_loss "vanilla" is right for one update per rollout: set num_iterations and '
            'num_mini_batches to 1, or policy_loss to "clipped_surrogate"'
        )
    moved = {
        "target_kl": args.target_kl is not None,
        f"policy_loss {args.policy_loss!r}": "old_kl_coef" in args.loss_options,
    }
    for what, wanted in moved.items():
        if wanted and args.updates_per_step == 1:
            yield (
                f"{what} goes by how far earlier updates of a step have moved the policy, and "
                "there is only one update: raise num_iterations or num_mini_batches"
            )
    if args.router_aux_loss_coef and not args.disable_dropout:
        yield (
            "router_aux_loss_coef counts what the routers choose in a pass of its own, which with "
            "disable_dropout false draws other dropout and jitter than the pass with gradients: "
            "leave one of them out"
        )
    high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if args.delta is not None and args.delta <= high:
        yield (
            f"delta must be above the upper clip bound, 1 + epsilon_high = {high}, got {args.delta}"
        )
    low, most = args.entropy_coef_min, args.entropy_coef_max
    if args.entropy_target is not None and not low <= args.entropy_coef <= most:
        yield (
            f"entropy_coef must be between entropy_coef_min ({low}) and entropy_coef_max ({most}), "
            f"got {args.entropy_coef}"
        )
    if args.sampler_clip_min is not None and args.sampler_clip_min >= args.sampler_clip_max:
        yield (
            f"sampler_clip_min must be below sampler_clip_max ({args.sampler_clip_max}), got "
            f"{args.sampler_clip_min}"
        )


def of_kl(args: Any) -> Iterator[str]:
    if args.beta == 0:
        return
    completions = args.prompts_per_step * args.num_generations
    if args.kl_controller == "adaptive" and completions >= 5 * args.kl_horizon:
        yield (
            f"kl_horizon must be more than a fifth of the {completions} completions of a step, or "
            f"one step could turn beta negative, got {args.kl_horizon}"
        )
    if args.kl_placement == "loss" and args.kl_estimator == "k1":
        yield (
            'kl_estimator "k1" in the loss has an expected gradient of 0: use "k1_to_go", or '
            'kl_placement "reward"'
        )
    if args.kl_placement == "reward" and args.kl_estimator not in ("k1", "k2", "k3"):
        yield (
            f"kl_estimator {args.kl_estimator!r} is a form of the loss: with kl_placement "
            '"reward" use "k1"'
        )


def of_idle(args: Any) -> Iterator[str]:
    """Options that would be ignored."""
    penalized = "old_kl_coef" in args.loss_options and args.old_kl_coef > 0
    correcting = args.correction_of(args.rollout_engine) != "none"
    scaled = getattr(args, "scale_rewards", "none") != "none"
    for needed, used, keys in (
        ("on_reward_error value", args.on_reward_error == "value", "reward_error_value"),
        ("missing_eos_penalty", args.missing_eos_penalty is not None, "missing_eos_mode"),
        ("overlong_buffer", args.overlong_buffer is not None, "overlong_penalty"),
        ("policy_loss kl_penalty and old_kl_coef", penalized, "old_kl_target"),
        ("sampler_correction", correcting, "sampler_clip_max sampler_clip_min"),
        (
            "entropy_target",
            args.entropy_target is not None,
            "entropy_coef_delta entropy_coef_min entropy_coef_max",
        ),
        ("beta", args.beta > 0, "kl_controller sync_ref_model"),
        ("kl_controller", args.kl_controller != "fixed", "kl_target"),
        ("kl_controller adaptive", args.kl_controller == "adaptive", "kl_horizon"),
        ("positive_nll_coef", args.positive_nll_coef > 0, "positive_nll_threshold"),
        ("sync_ref_model", args.sync_ref_model, "ref_model_sync_steps ref_model_mixup_alpha"),
        ("scale_rewards group or batch", scaled, "scale_rewards_eps"),
        ("num_generations_eval above 1", args.num_generations_eval > 1, "eval_success_threshold"),
        ("push_to_hub", args.push_to_hub, "hub_model_id hub_private_repo"),
    ):
        yield from idle(
            args, keys, used, f"has no effect without {needed}: set that, or leave it out"
        )
    for choice in ("advantage_estimator", "policy_loss"):
        name, functions = getattr(args, choice), registry(choice)
        options = set().union(*(parameters(function) for function in functions.values()))
        unused = " ".join(sorted(options - parameters(functions[name])))
        yield from idle(args, unused, False, f"is not used by {choice} {name!r}: leave it out")


def of_critic(args: Any) -> Iterator[str]:
    if not args.has_critic:
        return
    if args.lam_alpha is not None:
        yield from idle(args, "lam", False, "is not used with lam_alpha: leave one of them out")
    why = "is for a separate critic: set critic to separate, or leave it out"
    yield from idle(args, "value_model_name_or_path value_init", args.critic != "shared", why)
    if args.value_init == "random" and args.use_peft:
        yield "value_init random has no weights worth an adapter: leave out use_peft"
    if args.value_init == "random" and args.value_model_name_or_path is not None:
        yield (
            "value_init random takes the policy's architecture: leave out value_model_name_or_path"
        )
    taught = "value_lam value_pretraining_steps value_iterations normalize_values"
    why = "is for a critic that learns: set vf_coef, or leave it out"
    yield from idle(args, taught, args.vf_coef > 0, why)


def of_supervised(args: Any) -> Iterator[str]:
    if args.algorithm == "sft":
        if args.assistant_only_loss and args.completion_only_loss is False:
            yield (
                "assistant_only_loss learns no prompt, and completion_only_loss: false learns it: "
                "leave one of them out"
            )
    elif args.load_in_4bit:
        yield (
            "load_in_4bit is not for a reward model, whose adapter is merged into its weights on "
            "saving: leave it out, and use_peft trains an adapter on whole weights"
        )
    elif args.save_merged:
        yield "save_merged is not needed: a reward model is always saved merged"


OF_SUPERVISED = (of_model, of_data, of_supervised)
OF_REWARDS = (
    *(of_model, of_data, of_run, of_sampling, of_rewards, of_estimator, of_updates, of_kl),
    *(of_idle, of_critic),
)


def _not_one_of(args: Any, key: str, names: Sequence[str]) -> str:
    given = getattr(args, key)
    return f"{key} must be one of {', '.join(names)}, got {given!r}{nearest(given, names)}"


def warnings(args: Any) -> list[str]:
    """Return warnings, one sentence each, about settings that are allowed but seldom meant."""
    if args.importance_sampling_level == "sequence" and args.aggregation != "sequence_mean":
        return [
            "importance_sampling_level sequence has one number for a completion, which aggregation "
            f"{args.aggregation} counts once per token, so that long completions weigh more: the "
            "paper (GSPO) has sequence_mean"
        ]
    return []
