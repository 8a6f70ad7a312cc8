"""Rules on which keys go together: those that would be ignored or wrong are refused by name."""

from typing import Any

from rlhf_pg.advantages import ADVANTAGES, IN_BATCH, IN_GROUP, NEED_VALUES, PER_TOKEN
from rlhf_pg.config.fields import parameters
from rlhf_pg.config.method import MethodConfig
from rlhf_pg.losses import POLICY_LOSSES

# These use the rewards of tokens, not the scores of completions.
PAID_ALONE = {"returns", "total_returns", *NEED_VALUES}


def check(args: MethodConfig) -> None:
    """Refuse keys that do not go together.

    Raises:
        ValueError: the message names the keys and says what to change.
    """
    for rule in (
        check_ranges,
        check_rewards,
        check_estimator,
        check_loss,
        check_updates,
        check_kl,
        check_sampling,
        check_idle,
    ):
        rule(args)


def check_ranges(args: MethodConfig) -> None:
    high = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
    if args.delta is not None and args.delta <= high:
        raise ValueError(
            f"delta must be above the upper clip bound, 1 + epsilon_high = {high}, got {args.delta}"
        )
    low_to_high = (args.entropy_coef_min, args.entropy_coef, args.entropy_coef_max)
    if args.entropy_target is not None and list(low_to_high) != sorted(low_to_high):
        raise ValueError(
            f"entropy_coef must be between entropy_coef_min ({low_to_high[0]}) and "
            f"entropy_coef_max ({low_to_high[2]}), got {args.entropy_coef}"
        )


def check_rewards(args: MethodConfig) -> None:
    if args.reward_clip_range is not None:
        low_high = args.reward_clip_range
        if len(low_high) != 2 or low_high[0] >= low_high[1]:
            raise ValueError(
                f"reward_clip_range must be a lower and a higher number, got {low_high}"
            )
    if args.reward_squash != "none" and args.normalize_rewards:
        raise ValueError(
            "reward_squash and normalize_rewards both set the scale of a score: leave one out"
        )
    if (args.overlong_buffer or 0) > args.max_completion_length:
        raise ValueError(
            f"overlong_buffer must be at most max_completion_length "
            f"({args.max_completion_length}), whose last tokens it is, got "
            f"{args.overlong_buffer}"
        )
    if args.whiten_rewards and args.advantage_estimator not in PAID_ALONE:
        raise ValueError(
            "whiten_rewards rescales what each token is paid, and advantage_estimator "
            f"{args.advantage_estimator!r} looks at the scores of completions, which stay as "
            'they are: choose "returns" or one with a critic, or leave it out'
        )


def check_estimator(args: MethodConfig) -> None:
    """Refuse an estimator with nothing to compare."""
    name = args.advantage_estimator
    if args.has_critic and name not in NEED_VALUES:
        raise ValueError(
            f"advantage_estimator {name!r} makes no use of the critic that PPO trains: choose "
            f"{', '.join(sorted(NEED_VALUES))}, or another algorithm"
        )
    if name in NEED_VALUES and not args.has_critic:
        raise ValueError(f"advantage_estimator {name!r} needs a critic: only PPO has one")
    compared = args.num_generations * (args.prompts_per_step if name in IN_BATCH else 1)
    if compared < 2 and name in IN_GROUP | IN_BATCH:
        raise ValueError(
            f"advantage_estimator {name!r} compares completions: raise num_generations (or "
            "prompts_per_step, for one that compares over the batch)"
        )
    if name == "process_group_normalized" and args.beta > 0 and args.kl_placement == "reward":
        raise ValueError(
            f"advantage_estimator {name!r} looks at the steps alone and would lose the KL: set "
            'kl_placement to "loss"'
        )


def check_loss(args: MethodConfig) -> None:
    """Refuse advantages that a loss for whole rows cannot take."""
    name = args.advantage_estimator
    if args.importance_sampling_level == "sequence" and name in PER_TOKEN:
        raise ValueError(
            "importance_sampling_level 'sequence' takes one advantage per completion, and "
            f"advantage_estimator {name!r} gives one per token: use group_normalized or "
            "leave_one_out"
        )


def check_updates(args: MethodConfig) -> None:
    """Refuse options that do not suit the number of updates per rollout."""
    if args.policy_loss == "vanilla" and args.updates_per_step > 1:
        raise ValueError(
            'policy_loss "vanilla" is right for one update per rollout: set num_iterations and '
            'num_mini_batches to 1, or policy_loss to "clipped_surrogate"'
        )
    if args.router_aux_loss_coef and not args.disable_dropout:
        raise ValueError(
            "router_aux_loss_coef counts what the routers choose in a pass of its own, which "
            "with disable_dropout false draws other dropout and jitter than the pass with "
            "gradients: leave one of them out"
        )
    moved = {
        "target_kl": args.target_kl is not None,
        f"policy_loss {args.policy_loss!r}": "old_kl_coef" in args.loss_options,
    }
    for what, wanted in moved.items():
        if wanted and args.updates_per_step == 1:
            raise ValueError(
                f"{what} goes by how far earlier updates of a step have moved the policy, and "
                "there is only one update: raise num_iterations or num_mini_batches"
            )


def check_kl(args: MethodConfig) -> None:
    if args.beta == 0:
        return
    completions = args.prompts_per_step * args.num_generations
    if args.kl_controller == "adaptive" and completions >= 5 * args.kl_horizon:
        raise ValueError(
            f"kl_horizon must be more than a fifth of the {completions} completions of a step, "
            f"or one step could turn beta negative, got {args.kl_horizon}"
        )
    if args.kl_placement == "loss" and args.kl_estimator == "k1":
        raise ValueError(
            'kl_estimator "k1" in the loss has an expected gradient of 0: use "k1_to_go", or '
            'kl_placement "reward"'
        )
    if args.kl_placement == "reward" and args.kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(
            f"kl_estimator {args.kl_estimator!r} is a form of the loss: with kl_placement "
            '"reward" use "k1"'
        )


def check_sampling(args: MethodConfig) -> None:
    if args.dynamic_sampling_rounds and args.num_generations < 2:
        raise ValueError(
            "dynamic_sampling_rounds samples again where all scores of a group are equal: raise "
            "num_generations, or leave it out"
        )
    of_steps = args.advantage_estimator == "process_group_normalized"
    if args.dynamic_sampling_rounds and of_steps:
        raise ValueError(
            "dynamic_sampling_rounds sets groups of equal total scores aside, whose steps may "
            "differ: leave it out, or choose another advantage_estimator than "
            "process_group_normalized"
        )
    if args.sampler_clip_min is not None and args.sampler_clip_min >= args.sampler_clip_max:
        raise ValueError(
            f"sampler_clip_min must be below sampler_clip_max ({args.sampler_clip_max}), got "
            f"{args.sampler_clip_min}"
        )


def check_idle(args: MethodConfig) -> None:
    """Refuse options that would be ignored."""
    penalized = "old_kl_coef" in args.loss_options and args.old_kl_coef > 0
    moving, adaptive = args.kl_controller != "fixed", args.kl_controller == "adaptive"
    correcting, bonus = (
        args.correction_of(args.rollout_engine) != "none",
        args.entropy_target is not None,
    )
    for needed, used, keys in (
        ("on_reward_error value", args.on_reward_error == "value", "reward_error_value"),
        ("missing_eos_penalty", args.missing_eos_penalty is not None, "missing_eos_mode"),
        ("overlong_buffer", args.overlong_buffer is not None, "overlong_penalty"),
        ("policy_loss kl_penalty and old_kl_coef", penalized, "old_kl_target"),
        ("sampler_correction", correcting, "sampler_clip_max sampler_clip_min"),
        ("entropy_target", bonus, "entropy_coef_delta entropy_coef_min entropy_coef_max"),
        ("beta", args.beta > 0, "kl_controller sync_ref_model"),
        ("kl_controller", moving, "kl_target"),
        ("kl_controller adaptive", adaptive, "kl_horizon"),
        ("positive_nll_coef", args.positive_nll_coef > 0, "positive_nll_threshold"),
        ("sync_ref_model", args.sync_ref_model, "ref_model_sync_steps ref_model_mixup_alpha"),
    ):
        why = f"has no effect without {needed}: set that, or leave it out"
        args.refuse_idle(tuple(keys.split()), used, why)
    registries: dict[str, dict[str, Any]] = {
        "advantage_estimator": ADVANTAGES,
        "policy_loss": POLICY_LOSSES,
    }
    for choice_, functions in registries.items():
        name = getattr(args, choice_)
        options = set().union(*(parameters(function) for function in functions.values()))
        idle = sorted(options - parameters(functions[name]))
        args.refuse_idle(tuple(idle), False, f"is not used by {choice_} {name!r}: leave it out")


def warnings(args: MethodConfig) -> list[str]:
    """Return warnings, one sentence each, about settings that are allowed but seldom meant."""
    if args.importance_sampling_level == "sequence" and args.aggregation != "sequence_mean":
        return [
            "importance_sampling_level sequence has one number for a completion, which aggregation "
            f"{args.aggregation} counts once per token, so that long completions weigh more: the "
            "paper (GSPO) has sequence_mean"
        ]
    return []
