"""Rules on which keys go together; each yields a message for every key that is ignored or wrong."""

from collections.abc import Iterable, Iterator
from typing import Any

from rlhf_pg.boundary.quoted import SECRET, USER, quote, texts
from rlhf_pg.config.fields import ConfigError, is_set, parameters, registry
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.run import SCHEDULES

EMBEDDED = ("arithmetic", "preference", "guess", "calculator")
THIRD_PARTY = ("reasoning_gym", "verifiers", "openenv")  # before a colon and a name
# Arguments of from_pretrained that have their own keys or would break a run.
OWN_KEYS = {
    **{key: f"set {key}" for key in ("attn_implementation", "trust_remote_code", "dtype")},
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "set load_in_4bit"),
    "torch_dtype": "set dtype",
    "quantization_config": "set load_in_4bit, or give it to the trainer in Python",
    "device_map": "leave it out, since the launcher chooses devices",
    # In evaluation mode, in which models are trained here, transformers takes kernels for inference
    # ("the kernel's backward does not match the rotary embedding's").
    "use_kernels": "leave it out, since kernels for inference have no gradient, or a wrong one",
    "token": "set HF_TOKEN in the environment, since config.yaml would keep a token",
}


def check(args: Any) -> None:
    """Refuse the keys of a config that do not go together."""
    if not hasattr(args, "advantage_estimator"):
        messages = [*of_supervised(args)]
    elif not (messages := [*of_names(args)]):  # the other rules need the functions of these names
        messages = [*of_samples(args), *of_estimator(args), *of_updates(args), *of_use(args)]
    refuse([*of_inputs(args), *filter(None, messages)])


def refuse(messages: Iterable[str]) -> None:
    """Raise ConfigError if there are messages; each begins with a key."""
    if pairs := [(message.partition(" ")[0], message) for message in messages]:
        raise ConfigError(pairs)


def of_inputs(args: Any) -> Iterator[str]:
    for key in args.model_init_kwargs.keys() & OWN_KEYS:
        yield f"model_init_kwargs must not have {key!r}: {OWN_KEYS[key]}"
    for keys, text in texts(vars(args)):
        is_secret = text[:1] not in ("", "$") and any(map(SECRET.fullmatch, keys))
        if is_secret or USER.search(text):
            yield (  # without its value
                f"{keys[0]} has a secret in {quote('.'.join(keys))}, which config.yaml and the "
                "published model card would keep: read it from an environment variable (servers "
                "and judges by api_key_env)"
            )
    if "/" in (args.attn_implementation or "") and not args.trust_remote_code:
        yield "trust_remote_code must be true for kernels of the Hub, which are code"
    if args.lora_dropout and args.disable_dropout:
        yield "lora_dropout needs disable_dropout: false"
    if args.max_steps == 0:
        yield "max_steps must be at least 1, or -1 to go by num_train_epochs, got 0"
    if args.lr_scheduler_type not in SCHEDULES:
        yield _not_one_of(args, "lr_scheduler_type", SCHEDULES)
    source, _, name = (args.task or "").partition(":")
    is_third_party = source in THIRD_PARTY and bool(name)
    if args.task is not None and args.task not in EMBEDDED and not is_third_party:
        yield _not_one_of(args, "task", [*EMBEDDED, *(f"{one}:NAME" for one in THIRD_PARTY)])
    if args.task is not None and args.dataset_name:
        yield "task has its own data: leave out task or dataset_name"
    weights = args.dataset_weights
    names = args.dataset_name
    if weights is not None and (len(weights) != len(names) or min(weights, default=0) <= 0):
        yield f"dataset_weights must have one number above 0 for each dataset, got {weights}"
    if isinstance(args.dataset_test_split, float) and args.eval_dataset_name:
        yield "dataset_test_split and eval_dataset_name both name evaluation data: leave one out"
    of_all = "dataset_config dataset_test_split dataset_columns"
    yield from idle(
        args,
        ("use_peft", args.use_peft, "lora_r lora_alpha lora_dropout lora_target_modules"),
        ("a task of another library", is_third_party, "task_options"),
        ("dataset_name", bool(names), "dataset_train_split"),
        ("dataset_name", bool(names + args.eval_dataset_name), of_all),
    )


def of_names(args: Any) -> Iterator[str]:
    for key in ("advantage_estimator", "policy_loss"):
        if getattr(args, key) not in registry(key):  # `locate` loads a function of the user's
            yield "" if ":" in getattr(args, key) else _not_one_of(args, key, registry(key))


def of_samples(args: Any) -> Iterator[str]:
    """Yield errors in the keys of completions and their scores."""
    if "" in (args.stop or ()):
        yield "stop must not hold an empty string, which would end every completion at once"
    for key, everything in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        value = getattr(args, key)
        if value != everything and args.truncated_sampling == "refuse":
            yield f"{key} {value} biases the gradient: drop it, or set truncated_sampling: ignore"
    if any({"@", "?", "#"} & set(url) for url in args.vllm_server_base_url):
        yield "vllm_server_base_url: leave out user, password and query (config.yaml keeps them)"
    elif not args.vllm_server_base_url:
        yield "vllm_server_base_url must have a URL"
    elif not all(x.startswith(("http://", "https://")) for x in args.vllm_server_base_url):
        given = quote(", ".join(args.vllm_server_base_url))
        yield f"vllm_server_base_url must begin with http:// or https://, got {given!r}"
    if args.rollout_ahead and not args.rollout_workers and args.rollout_engine != "vllm_server":
        yield "rollout_ahead needs rollout_workers, or rollout_engine vllm_server"
    bounds = args.reward_clip_range
    if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        yield f"reward_clip_range must be a lower and a higher number, got {bounds}"
    if args.reward_squash != "none" and args.normalize_rewards:
        yield "reward_squash and normalize_rewards both set the scale of a score: leave one out"
    buffer = args.overlong_buffer or 0
    longest = args.max_completion_length
    if buffer > longest:
        yield f"overlong_buffer must be at most max_completion_length ({longest}), got {buffer}"


def of_estimator(args: Any) -> Iterator[str]:
    from rlhf_pg.advantages import IN_BATCH, IN_GROUP, NEED_VALUES, PER_TOKEN

    name = args.advantage_estimator
    this = f"advantage_estimator {name!r}"
    if args.has_critic and name not in NEED_VALUES and ":" not in name:
        yield f"{this} does not use the critic: choose {', '.join(sorted(NEED_VALUES))}"
    if name in NEED_VALUES and not args.has_critic:
        yield f"{this} needs a critic: only PPO has one"
    compared = args.num_generations * (args.prompts_per_step if name in IN_BATCH else 1)
    if compared < 2 and name in IN_GROUP | IN_BATCH:
        yield f"{this} compares completions: raise num_generations"
    if args.whiten_rewards and name not in {"returns", "total_returns", *NEED_VALUES}:
        yield f"whiten_rewards is for rewards per token, which {name!r} does not use: leave it out"
    pays = args.teacher_model_name_or_path is not None and args.teacher_placement == "reward"
    if args.importance_sampling_level == "sequence" and pays:
        yield "importance_sampling_level must be 'token': the teacher pays every token"
    if args.importance_sampling_level == "sequence" and name in PER_TOKEN:
        yield f"importance_sampling_level must be 'token': {name!r} gives one advantage per token"
    # These normalise the scores of steps or sources instead of their sum.
    in_parts = name in ("process_group_normalized", "group_normalized_per_source")
    if in_parts and args.beta > 0 and args.kl_placement == "reward":
        yield f'kl_placement must be "loss" with {name}'
    if in_parts and args.dynamic_sampling_rounds:
        yield f"dynamic_sampling_rounds uses total scores, unlike {name}: leave it out"
    if args.dynamic_sampling_rounds and args.num_generations < 2:
        yield "dynamic_sampling_rounds compares the scores of a group: raise num_generations"


def of_updates(args: Any) -> Iterator[str]:
    """Yield errors in the number of updates, ranges that depend on other keys, and the KL."""
    prompts = args.prompts_per_step
    batches = args.num_mini_batches
    if batches > prompts:
        yield f"num_mini_batches must be at most prompts_per_step ({prompts}), got {batches}"
    if args.policy_loss == "vanilla" and args.updates_per_step > 1:
        yield 'policy_loss "vanilla" is for one update per rollout: choose "clipped_surrogate"'
    others = args.ptx_coef + args.positive_nll_coef + args.tool_output_nll_coef
    taught = args.teacher_model_name_or_path is not None and args.teacher_placement == "loss"
    if args.policy_loss == "none" and not (taught or others):
        yield "policy_loss none needs another: teacher_model_name_or_path in the loss, or ptx_coef"
    if args.policy_loss == "none" and args.target_kl is not None:
        yield "target_kl is measured by a policy_loss with a ratio, not by none"
    if args.updates_per_step == 1:  # these measure how far earlier updates have moved the policy
        several = "needs several updates per step: raise num_iterations or num_mini_batches"
        if args.target_kl is not None:
            yield f"target_kl {several}"
        if "old_kl_coef" in args.loss_options:
            yield f"policy_loss {args.policy_loss!r} {several}"
    high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if args.delta is not None and args.delta <= high:
        yield f"delta must be above the clip bound 1 + epsilon_high = {high}, got {args.delta}"
    if args.entropy_target is not None:
        low = args.entropy_coef_min
        most = args.entropy_coef_max
        given = args.entropy_coef
        if not low <= given <= most:
            yield (
                f"entropy_coef must be between entropy_coef_min ({low}) and entropy_coef_max "
                f"({most}), got {given}"
            )
    if args.sampler_clip_min is not None and args.sampler_clip_min >= args.sampler_clip_max:
        yield f"sampler_clip_min must be below sampler_clip_max, got {args.sampler_clip_min}"
    if args.beta > 0:
        fifth = prompts * args.num_generations / 5
        horizon = args.kl_horizon
        if args.kl_controller == "adaptive" and horizon <= fifth:  # beta could become negative
            yield f"kl_horizon must be above {fifth:g}, a step's completions / 5, got {horizon}"
        if args.kl_placement == "loss" and args.kl_estimator == "k1":
            yield 'kl_estimator "k1" in the loss has an expected gradient of 0: use "k1_to_go"'
        if args.kl_placement == "reward" and args.kl_estimator not in ("k1", "k2", "k3"):
            yield f'kl_estimator {args.kl_estimator!r} is for the loss: use "k1" in the reward'


def of_use(args: Any) -> Iterator[str]:
    """Yield the keys that would be ignored."""
    engine = args.rollout_engine
    given = vars(args).get
    of_native = "rollout_cache_tokens rollout_workers"
    in_process = "vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_max_model_length"
    of_server = "vllm_server_base_url vllm_server_timeout vllm_sync_directory"
    corrects = args.correction_of(engine) != "none"
    penalizes = "old_kl_coef" in args.loss_options and args.old_kl_coef > 0
    scale = given("scale_rewards")
    entropy_keys = "entropy_coef_delta entropy_coef_min entropy_coef_max"
    of_critic = "value_lam value_pretraining_steps value_iterations normalize_values"
    teacher = args.teacher_model_name_or_path
    in_loss = "teacher_divergence teacher_top_k"
    of_teacher = f"teacher_coef teacher_placement privileged_prompt {in_loss}"
    to_go = args.teacher_placement == "reward" and not args.has_critic
    yield from idle(
        args,
        ("rollout_engine native", engine in ("auto", "native"), of_native),
        ("rollout_engine vllm", engine in ("auto", "vllm"), in_process),
        ("rollout_engine vllm_server", engine == "vllm_server", of_server),
        ("sampler_correction", corrects, "sampler_clip_max sampler_clip_min"),
        ("on_reward_error value", args.on_reward_error == "value", "reward_error_value"),
        ("missing_eos_penalty", args.missing_eos_penalty is not None, "missing_eos_mode"),
        ("overlong_buffer", args.overlong_buffer is not None, "overlong_penalty"),
        ("scale_rewards group or batch", scale not in ("mean", "none"), "scale_rewards_eps"),
        ("policy_loss kl_penalty and old_kl_coef", penalizes, "old_kl_target"),
        ("entropy_target", args.entropy_target is not None, entropy_keys),
        ("positive_nll_coef", args.positive_nll_coef > 0, "positive_nll_threshold"),
        ("agent_credit episode", args.agent_credit == "episode", "value_lam"),
        ("teacher_model_name_or_path", teacher is not None, of_teacher),
        ("teacher_placement loss", args.teacher_placement == "loss", in_loss),
        ("teacher_divergence js", args.teacher_divergence == "js", "teacher_mixture"),
        ("a divergence over the vocabulary", args.teacher_divergence != "sampled", "teacher_top_k"),
        ("teacher_placement reward without a critic", to_go, "teacher_gamma"),
        ("teacher_model_name_or_path policy", teacher == "policy", "teacher_mixup_alpha"),
        ("ptx_coef", args.ptx_coef > 0, "ptx_dataset_name ptx_batch_size"),
        ("ptx_dataset_name", args.ptx_dataset_name is not None, "ptx_coef"),
        ("beta", args.beta > 0, "kl_controller sync_ref_model"),
        ("kl_controller", args.kl_controller != "fixed", "kl_target"),
        ("kl_controller adaptive", args.kl_controller == "adaptive", "kl_horizon"),
        ("sync_ref_model", args.sync_ref_model, "ref_model_sync_steps ref_model_mixup_alpha"),
        ("num_generations_eval above 1", args.num_generations_eval > 1, "eval_success_threshold"),
        ("push_to_hub", args.push_to_hub, "hub_model_id hub_private_repo"),
        ("lam_alpha None", given("lam_alpha") is None, "lam"),
        ("critic separate", given("critic") == "separate", "value_model_name_or_path value_init"),
        ("value_init pretrained", given("value_init") != "random", "value_model_name_or_path"),
        ("vf_coef", given("vf_coef") != 0, of_critic),
    )
    if given("value_init") == "random" and args.use_peft:
        yield "value_init random cannot be used with an adapter: leave out use_peft"
    for choice in ("advantage_estimator", "policy_loss"):
        name = getattr(args, choice)
        functions = registry(choice)
        options = set().union(*map(parameters, functions.values()))
        for key in sorted(options - parameters(functions[name])):
            if is_set(args, key):
                yield f"{key} is not used by {choice} {name!r}: leave it out"


def of_supervised(args: Any) -> Iterator[str]:
    if args.algorithm == "sft":
        if args.assistant_only_loss and args.completion_only_loss is False:
            yield "assistant_only_loss excludes prompts: leave out completion_only_loss: false"
    elif args.load_in_4bit:
        yield "load_in_4bit is not for a reward model, which is saved merged: set use_peft alone"
    elif args.save_merged:
        yield "save_merged is not needed: a reward model is always saved merged"


def idle(args: Any, *needs: tuple[str, bool, str]) -> Iterator[str]:
    """Yield keys without effect; each of `needs` is a need, whether it is met, and its keys."""
    for needed, is_met, keys in needs:
        for key in keys.split():
            if not is_met and is_set(args, key):
                yield f"{key} has no effect without {needed}: set that, or leave it out"


def _not_one_of(args: Any, key: str, names: Iterable[str]) -> str:
    given = getattr(args, key)
    return f"{key} must be one of {', '.join(names)}, got {given!r}{nearest(given, names)}"
