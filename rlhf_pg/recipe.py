"""Reading a config: defaults < YAML < flags.

An unknown key, a wrong type or a value out of range is one error that names the key and the file,
before any model loads.
"""

import argparse
import dataclasses
import difflib
import io
import os
import reprlib
import sys
import types
import typing
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
import yaml

C = TypeVar("C")

LONGEST = 1 << 20  # bytes of a recipe

# What users of other libraries type, and where to find it here.
ELSEWHERE = {
    "per_device_train_batch_size": "prompts_per_step (global) and micro_batch_tokens (memory)",
    "gradient_accumulation_steps": "micro_batch_tokens; it never changes the result",
    "generation_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "steps_per_generation": "num_mini_batches",
    "loss_type": "aggregation (token_mean, sequence_mean, constant) and policy_loss",
    "loss_agg_mode": "aggregation (token_mean, sequence_mean, constant)",
    "adv_estimator": "advantage_estimator",
    "use_vllm": "rollout_engine: vllm; auto takes it on a GPU where it is installed and suits",
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
    **dict.fromkeys(
        ("logging_steps", "write_interval"), "metrics.jsonl, which has a line for every step"
    ),
    "repetition_penalty": "temperature; the policy that trains knows of no penalty on what was "
    "said before, and sampling with one would bias the gradient",
}

# What texts on reinforcement learning offer, and why it has no meaning here.
NO_MEANING = {
    "random_timesteps": "random tokens are no language, and a sampled policy explores as it is",
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


def parse(config_type: type[C], args: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Read a config: defaults < the YAML file given as `--config` < the other flags.

    The YAML is read as values: a string in it is one, however much it looks like a flag.

    Args:
        prog: what `--help` calls the program.

    Raises:
        SystemExit: status 2, after one message that names the key and, for YAML, the file.
    """
    recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--config", type=Path)
    known, flags = recipe.parse_known_args(args)
    for flag in flags:
        if flag.startswith("--"):
            key = flag.removeprefix("--").split("=")[0].replace("-", "_")
            _refuse_elsewhere(key, "command line")
    from_file = None
    if known.config:
        from_file = _from_file(known.config, config_type)
    return _cli(config_type, flags, from_file, prog)


def _cli(config_type: type[C], flags: Sequence[str], default: C | None, prog: str | None) -> C:
    with nullcontext() if _is_main() else redirect_stderr(io.StringIO()):
        return tyro.cli(
            config_type,
            args=flags,
            default=tyro.MISSING_NONPROP if default is None else default,
            prog=prog,
            use_underscores=True,
            console_outputs=_is_main(),
            config=(tyro.conf.FlagConversionOff,),
        )


def recipe_file(name: str) -> Path:
    """A recipe that comes with the package: beside it in a checkout, inside it when installed."""
    package = Path(__file__).parent
    installed = package / "recipes" / name
    return installed if installed.exists() else package.parent / "recipes" / name


def load(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; exits like `fail` if it is none."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            fail(f"{path}: is longer than {LONGEST} bytes: it is no recipe")
        recipe = yaml.load(text.decode(), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read: {getattr(error, 'strerror', error)}")
    except RecursionError:
        fail(f"{path}: not valid YAML for a recipe: it is nested too deeply")
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not, for one
        fail(f"{path}: not valid YAML: {error}")
    if not isinstance(recipe, dict):
        fail(f"{path}: expected `key: value` lines, got {type(recipe).__name__}")
    return recipe


def _from_file(path: Path, config_type: type[C]) -> C:
    """The config that a YAML file asks for."""
    recipe = load(path)
    hints = typing.get_type_hints(config_type)
    keys = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in recipe.items():
        _refuse_elsewhere(str(key), str(path), known=keys)
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            fail(f"{path}: unknown key {reprlib.repr(key)} for {config_type.__name__}{hint}")
        if value is None and type(None) not in typing.get_args(hints[key]):
            fail(f"{path}: {key} must have a value, got null")
        values[key] = _meant(value, hints[key])
    try:
        return config_type(**values)
    except ValueError as error:
        fail(f"{path}: {error}")


def _meant(value: Any, hint: Any) -> Any:
    """What YAML has read in the type that is wanted, where one can be made of the other.

    PyYAML takes `1e-5` for a string, and a name such as `2026` for a number; one of several values
    may stand without brackets.
    """
    wanted = typing.get_args(hint) if _is_union(hint) else (hint,)
    items = [typing.get_args(one)[0] for one in wanted if typing.get_origin(one) is tuple]
    if value is None or (value == "None" and type(None) in wanted):
        return None
    if items:
        return [_meant(item, items[0]) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, str):
        for number in {int, float}.intersection(wanted):
            with suppress(ValueError):
                return number(value)
    elif str in wanted and not isinstance(value, list | dict):
        return str(value)
    return value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key given twice, of which plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(f"key {twice[0]!r} stands twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _refuse_elsewhere(key: str, where: str, known: Sequence[str] = ()) -> None:
    if key in known:
        return
    if key in ELSEWHERE:
        fail(f"{where}: {key!r} is not a key here; see {ELSEWHERE[key]}")
    if key in NO_MEANING:
        fail(f"{where}: `{key}` has no meaning for a language model: {NO_MEANING[key]}")


def fail(message: str) -> NoReturn:
    """Say what is wrong, once for all processes, and exit with status 2."""
    if _is_main():
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _is_main() -> bool:
    """Whether this process speaks for all; one with a RANK and no launcher is alone."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def dump(config: Any, path: Path) -> None:
    """Write the resolved config as YAML that `parse` reads back to the same config."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
