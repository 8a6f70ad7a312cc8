"""Rules on which keys go together; each yields a message for every key that is ignored or wrong."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rlhf_pg.boundary.quoted import SECRET, USER, quote, texts
from rlhf_pg.config.fields import (
    ConfigError,
    default_of,
    is_set,
    metadata,
    parameters,
    registry,
)
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.method import ESTIMATORS
from rlhf_pg.config.run import SCHEDULES

EMBEDDED = ("arithmetic", "preference", "guess", "calculator")
THIRD_PARTY = ("reasoning_gym", "verifiers", "openenv")  # before a colon and a name
IN_PYTHON = ("tools", "environment_factory", "agent_program")  # keys that a trainer may be given
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
    rules = [of_inputs]
    if not hasattr(args, "advantage_estimator"):
        rules += [of_supervised, of_needs]
    elif args.has_functions:  # others are refused by name, or loaded by `locate`
        rules += [of_samples, of_estimator, of_updates, of_needs, of_functions]
    else:
        rules += [of_names]
    refuse(message for rule in rules for message in rule(args))


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
    if args.task_options and not is_third_party:
        yield "task_options has no effect without a task of another library: leave it out"


def of_names(args: Any) -> Iterator[str]:
    for key in ("advantage_estimator", "policy_loss"):
        if getattr(args, key) not in registry(key) and ":" not in getattr(args, key):
            yield _not_one_of(args, key, registry(key))


def of_samples(args: Any) -> Iterator[str]:
    """Yield errors in the keys of completions and their scores."""
    if "" in (args.stop or ()):
        yield "stop must not hold an empty string, which would end every completion at once"
    for key, everything in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        value = getattr(args, key)
        if value != everything and args.truncated_sampling == "refuse":
            yield f"{key} {value} biases the gradient: drop it, or set truncated_sampling: ignore"
    if args.vllm_quantization is not None and args.sampler_correction == "none":
        yield "sampler_correction must not be none with vllm_quantization: its sampler is not exact"
    if any({"@", "?", "#"} & set(url) for url in args.vllm_server_base_url):
        yield "vllm_server_base_url: leave out user, password and query (config.yaml keeps them)"
    elif not args.vllm_server_base_url:
        yield "vllm_server_base_url must have a URL"
    elif not all(x.startswith(("http://", "https://")) for x in args.vllm_server_base_url):
        given = quote(", ".join(args.vllm_server_base_url))
        yield f"vllm_server_base_url must begin with http:// or https://, got {given!r}"
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
    name = args.advantage_estimator
    traits = args.estimator_traits
    label = f"advantage_estimator {name!r}"
    if args.has_critic and traits.needs != "critic" and ":" not in name:
        others = [other for other, its in ESTIMATORS.items() if its.needs == "critic"]
        yield f"{label} does not use the critic: choose {', '.join(others)}"
    if traits.needs == "critic" and not args.has_critic:
        yield f"{label} needs a critic: only PPO has one"
    compared = args.num_generations
    if traits.compares == "batch":
        compared *= args.prompts_per_step
    if traits.compares and compared < 2:
        yield f"{label} compares completions: raise num_generations"
    has_baseline = traits.compares or traits.needs in ("greedy", "average")
    if args.whiten_rewards and (traits.reads != "rewards" or has_baseline):
        yield f"whiten_rewards is for rewards per token, which {name!r} does not use: leave it out"
    pays = args.teacher_model_name_or_path is not None and args.teacher_placement == "reward"
    if args.importance_sampling_level == "sequence" and pays:
        yield "importance_sampling_level must be 'token': the teacher pays every token"
    if args.importance_sampling_level == "sequence" and traits.reads in ("rewards", "steps"):
        yield f"importance_sampling_level must be 'token': {name!r} gives one advantage per token"
    # These normalise the scores of steps or sources instead of their sum.
    in_parts = traits.reads in ("steps", "sources")
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
    traits = args.loss_traits
    if traits.needs == "one update" and args.updates_per_step > 1:
        yield (
            f'policy_loss "{args.policy_loss}" is for one update per rollout: choose '
            '"clipped_surrogate"'
        )
    others = args.ptx_coef + args.positive_nll_coef + args.tool_output_nll_coef
    taught = args.teacher_model_name_or_path is not None and args.teacher_placement == "loss"
    if traits.needs == "another term" and not (taught or others):
        yield (
            f"policy_loss {args.policy_loss} needs another: teacher_model_name_or_path in the "
            "loss, or ptx_coef"
        )
    if args.policy_loss == "none" and args.target_kl is not None:
        yield "target_kl is measured by a policy_loss with a ratio, not by none"
    if args.updates_per_step == 1:  # these measure how far earlier updates have moved the policy
        several = "needs several updates per step: raise num_iterations or num_mini_batches"
        if args.target_kl is not None:
            yield f"target_kl {several}"
        if traits.needs == "several updates":
            yield f"policy_loss {args.policy_loss!r} {several}"
    if args.has_critic and is_set(args, "teacher_gamma"):
        yield "teacher_gamma has no effect with a critic: leave it out"
    high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if args.delta is not None and args.delta <= high:
        yield f"delta must be above the clip bound 1 + epsilon_high = {high}, got {args.delta}"
    if args.entropy_target is not None:
        low = args.entropy_coef_min
        high = args.entropy_coef_max
        if not low <= args.entropy_coef <= high:
            yield (
                f"entropy_coef must be between entropy_coef_min ({low}) and entropy_coef_max "
                f"({high}), got {args.entropy_coef}"
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


def of_needs(args: Any, arguments: Collection[str] = IN_PYTHON) -> Iterator[str]:
    """Yield the keys that would be ignored, since what they need is neither set nor among the
    `arguments` of the trainer.
    """
    for key, words in metadata(args).items():
        if "needs" in words and is_set(args, key):
            for need in words["needs"].split(" and "):
                if not is_met(args, need, arguments):
                    yield f"{key} has no effect without {need}: set that, or leave it out"
                    break
    if getattr(args, "value_init", None) == "random" and args.use_peft:
        yield "value_init random cannot be used with an adapter: leave out use_peft"


def is_met(args: Any, need: str, arguments: Collection[str] = IN_PYTHON) -> bool:
    """Return whether a need is met. Its alternatives, joined by " or ", are KEY (it is on), KEY
    VALUE and KEY above NUMBER; one that names no key is another value of the key before it.
    """
    key = ""
    for alternative in need.split(" or "):
        if hasattr(args, alternative.partition(" ")[0]):
            key, _, alternative = alternative.partition(" ")
        if alternative == str(getattr(args, key)).lower():
            return True
        if alternative == "" and (key in arguments or is_on(args, key)):
            return True
        if alternative.startswith("above ") and getattr(args, key) > float(alternative[6:]):
            return True
    return False


def is_on(args: Any, key: str) -> bool:
    """Return whether a key has a value by which something is done."""
    value = getattr(args, key)
    if key == "sampler_correction":
        value = args.correction_of(args.rollout_engine)
    if value == 0:  # False, too; where None stands for "off", 0 is a number like others
        return default_of(args, key) is None
    if value in (None, "none", ()):
        return False
    return not hasattr(args, "policy_loss") or key not in unused_options(args)


def unused_options(args: Any) -> dict[str, str]:
    """Return the keys that only other estimators or losses take, each with the choice of ours."""
    unused = {}
    for choice in ("advantage_estimator", "policy_loss"):
        functions = registry(choice)
        options = set().union(*map(parameters, functions.values()))
        for key in options - parameters(functions[getattr(args, choice)]):
            unused[key] = choice
    return unused


def of_functions(args: Any) -> Iterator[str]:
    """Yield the keys that the chosen estimator and loss do not take."""
    for key, choice in sorted(unused_options(args).items()):
        if is_set(args, key):
            yield f"{key} is not used by {choice} {getattr(args, choice)!r}: leave it out"


def of_supervised(args: Any) -> Iterator[str]:
    if args.algorithm == "sft":
        if args.assistant_only_loss and args.completion_only_loss is False:
            yield "assistant_only_loss excludes prompts: leave out completion_only_loss: false"
    elif args.load_in_4bit:
        yield "load_in_4bit is not for a reward model, which is saved merged: set use_peft alone"
    elif args.save_merged:
        yield "save_merged is not needed: a reward model is always saved merged"


def _not_one_of(args: Any, key: str, names: Iterable[str]) -> str:
    given = getattr(args, key)
    return f"{key} must be one of {', '.join(names)}, got {given!r}{nearest(given, names)}"
