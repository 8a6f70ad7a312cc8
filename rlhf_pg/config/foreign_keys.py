"""Keys of other libraries, and the keys to use here in their place.

Those of TRL and of transformers have files of their own.
"""

import difflib
import re
from collections.abc import Iterable

from rlhf_pg.config.supervised_keys import REWARDED, SUPERVISED_KEYS, SUPERVISED_NO_MEANING
from rlhf_pg.config.transformers_keys import TRANSFORMERS_KEYS, TRANSFORMERS_NO_MEANING
from rlhf_pg.config.trl_keys import TRAINER_ARGUMENTS, TRL_KEYS, TRL_NO_MEANING

# A key that this package had, and what to do in its place.
GONE = {
    "cpu_threads": "was removed in November 2026: set OMP_NUM_THREADS",
}

# A key of another library, and what to use here.
FOREIGN_KEYS = {
    **TRANSFORMERS_KEYS,
    **TRL_KEYS,
    "rollout_batch_size": "prompts_per_step",
    "loss_agg_mode": "aggregation (token_mean, sequence_mean, constant)",
    "adv_estimator": "advantage_estimator",
    "use_kl_loss": "kl_placement: loss",
    "use_kl_in_reward": "kl_placement: reward",
    "kl_loss_coef": "beta",
    **dict.fromkeys(("clip_ratio", "eps_clip", "ratio_clip", "pi_clip"), "epsilon"),
    "clip_ratio_high": "epsilon_high",
    **dict.fromkeys(("clip_ratio_c", "dual_clip"), "delta"),
    **dict.fromkeys(("value_clip", "vf_clip"), "cliprange_value, of PPO"),
    "clip_predicted_values": "cliprange_value, of PPO; null does not clip",
    "value_loss_scale": "vf_coef, of PPO",
    **dict.fromkeys(
        ("value_preprocessor", "value_preprocessor_kwargs"), "normalize_values, of PPO"
    ),
    "critic_learning_rate": "value_learning_rate, of PPO",
    **dict.fromkeys(("entropy_loss_scale", "entropy_coeff"), "entropy_coef"),
    "norm_adv_by_std_in_grpo": "scale_rewards, of GRPO",
    **dict.fromkeys(("lambda", "lambd", "lamb"), "lam, of PPO"),
    "discount_factor": "gamma, of PPO and REINFORCE",
    "whiten_advantages": "normalize_advantages",
    **dict.fromkeys(("learning_epochs", "n_epochs"), "num_iterations"),
    "mini_batches": "num_mini_batches",
    "ppo_mini_batch_size": "num_mini_batches: how many, not how large",
    "rollouts": "prompts_per_step and num_generations: every completion is a whole episode",
    "num_envs": "prompts_per_step and num_generations: every completion is a whole episode",
    "sequence_length": "max_prompt_length and max_completion_length",
    **dict.fromkeys(("max_new_tokens", "generate_max_len"), "max_completion_length"),
    "prompt_max_len": "max_prompt_length",
    "n_samples_per_prompt": "num_generations",
    **dict.fromkeys(("grad_norm_clip", "grad_clip"), "max_grad_norm"),
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
}

# A key of other libraries that has no meaning here, and why.
NO_MEANING = {
    **TRANSFORMERS_NO_MEANING,
    **TRL_NO_MEANING,
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

# Where a hint begins that holds for every run, and not with a key of its config.
ANYWHERE = {"the", "accelerate", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "Python"}


def explained(key: str, known: Iterable[str] = ()) -> str | None:
    """Explain what to use in place of another library's key; return None for any other key.

    Args:
        known: the keys of the config.
    """
    if key in GONE:
        return f"{key!r} {GONE[key]}"
    hint, reason = _found(key, known)
    if hint is not None:
        return f"{key!r} is not a key here; see {hint}"
    return None if reason is None else f"`{key}` has no meaning here: {reason}"


def _found(key: str, known: Iterable[str]) -> tuple[str | None, str | None]:
    """Return what to use in place of a key, or else the reason why it has no meaning."""
    hint, reason = FOREIGN_KEYS.get(key), NO_MEANING.get(key)
    if "batch_size" not in known:
        return hint, reason
    has_place = {*known} | ANYWHERE  # a run without rollouts
    for one in (SUPERVISED_KEYS.get(key), None if key in SUPERVISED_NO_MEANING else hint):
        if one is not None and re.findall(r"\w+", one)[0] in has_place:
            return one, None
    return None, SUPERVISED_NO_MEANING.get(key, reason or (hint and REWARDED))


def explained_argument(name: str, config: str, keys: Iterable[str]) -> str | None:
    """Explain what to do in place of an argument that a trainer does not take; or return None.

    Args:
        config: name of the trainer's config.
        keys: of the config.
    """
    if name in TRAINER_ARGUMENTS:
        return f"{name!r} {TRAINER_ARGUMENTS[name]}"
    if name in keys:
        return f"{name!r} is a key of the config: args={config}({name}=...)"
    return explained(name, keys)


def nearest(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the nearest known name, or nothing if none is similar."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
