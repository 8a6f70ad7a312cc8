"""Tables of docs/from-trl.md: every field of TRL's configs, and what it is here."""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from rlhf_pg.config import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_pg.config.foreign_keys import FOREIGN_KEYS, NO_MEANING
from rlhf_pg.config.trl_keys import TRAINER_ARGUMENTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl

# The fields of the PPOConfig that TRL had until September 2026, beside those of TrainingArguments,
# with their defaults; it is in no release that could be installed beside the others.
OLD_PPO: dict[str, Any] = {
    "dataset_num_proc": None,
    "num_mini_batches": 1,
    "total_episodes": None,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10,
    "response_length": 53,
    "stop_token": None,
    "stop_token_id": None,
    "temperature": 0.7,
    "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m",
    "world_size": None,
    "num_total_batches": None,
    "micro_batch_size": None,
    "local_batch_size": None,
    "batch_size": None,
    "local_mini_batch_size": None,
    "mini_batch_size": None,
    "exp_name": "ppo_config",
    "reward_model_path": "EleutherAI/pythia-160m",
    "model_adapter_name": None,
    "ref_adapter_name": None,
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "ds3_gather_for_generation": True,
    "reward_shaping_enable_length": False,
    "reward_shaping_enable_repetition": False,
    "reward_shaping_enable_eos": False,
    "reward_shaping_length_coef": 0.0,
    "reward_shaping_repetition_coef": 0.0,
    "reward_shaping_repetition_ngram": 4,
    "reward_shaping_eos_bonus": 0.0,
    "reward_shaping_eos_missing_penalty": 0.0,
    "reward_shaping_eos_out_of_range_penalty": 0.0,
    "reward_shaping_eos_min_len": 1,
    "reward_shaping_eos_max_len": 1000,
}


def defaults(config: Any) -> dict[str, Any]:
    """The fields of a dataclass with their defaults."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(config)
    }


BASE = defaults(TrainingArguments)


def own(config: Any) -> dict[str, Any]:
    """The fields of a config of TRL that are its own, or have another default than the base."""
    return {
        name: default
        for name, default in defaults(config).items()
        if name not in BASE or BASE[name] != default
    }


def tables() -> Iterator[tuple[str, str]]:
    """The name of each table, and the table."""
    yield "grpo", table(own(trl.GRPOConfig), defaults(GRPOConfig))
    grpo = own(trl.GRPOConfig)
    rloo = {
        name: default
        for name, default in own(trl.RLOOConfig).items()
        if name not in grpo or grpo[name] != default or differs(name)
    }
    yield "rloo", table(rloo, defaults(RLOOConfig))
    yield "ppo", table(OLD_PPO, defaults(PPOConfig))
    yield "base", table(BASE, defaults(GRPOConfig))
    yield "arguments", arguments()


def differs(name: str) -> bool:
    """Whether a key has another default in RLOOConfig than in GRPOConfig."""
    ours = [defaults(config).get(name) for config in (GRPOConfig, RLOOConfig)]
    return ours[0] != ours[1]


def table(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    rows = [
        "| TRL | Its default | Here | Default here |\n|---|---|---|---|",
        *(
            f"| `{name}` | {_default(default)} | {here(name, ours)} | "
            f"{_default(ours[name]) if name in ours else ''} |"
            for name, default in theirs.items()
        ),
    ]
    return "\n".join(rows)


def here(name: str, ours: Iterable[str]) -> str:
    """What a field of TRL is here; an error if nothing is said of it."""
    if name in ours:
        return "the same"
    if name in FOREIGN_KEYS:
        return _cell(FOREIGN_KEYS[name])
    return f"no meaning: {_cell(NO_MEANING[name])}"


def arguments() -> str:
    rows = [f"| `{name}` | {_cell(said)} |" for name, said in TRAINER_ARGUMENTS.items()]
    return "\n".join(["| Argument | Here |\n|---|---|", *rows])


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    text = getattr(value, "value", value)  # of an enumeration
    return f"`{list(text) if isinstance(text, tuple) else text}`" if text != "" else '`""`'


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
