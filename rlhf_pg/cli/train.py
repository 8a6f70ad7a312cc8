"""`rlhf-pg train`, and what the scripts in `recipes/` share with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.config.fields import short_repr
from rlhf_pg.config.parse import fail, load, parse, recipe_file
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.tasks import TASKS
from rlhf_pg.tasks.warm_start import ensure_model, warm_start
from rlhf_pg.trainers import (
    GRPOTrainer,
    PolicyGradientTrainer,
    PPOTrainer,
    ReinforceTrainer,
    RLOOTrainer,
)

C = TypeVar("C")


TRAINERS: dict[str, type[PolicyGradientTrainer]] = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "rloo": RLOOTrainer,
    "reinforce": ReinforceTrainer,
}


def train(recipe: Path, flags: Sequence[str]) -> None:
    """Do what a recipe file asks for by its key `algorithm`."""
    algorithm = load(recipe).get("algorithm")
    if algorithm == "sft":
        print(f"saved {warm_start(_config(SFTConfig, recipe, flags))}")
    elif algorithm == "reward_model":
        make_reward_model(_config(RewardModelConfig, recipe, flags))
    else:
        make_trainer(recipe, flags).train()


def _recipe(name: str) -> Path:
    """The file of this name, or else the preset."""
    preset = recipe_file(f"presets/{name}.yaml")
    return preset if preset.exists() and not Path(name).exists() else Path(name)


def make_reward_model(args: RewardModelConfig) -> None:
    """Train a reward model on the pairs of its task."""
    pairs, held_out = TASKS[args.task]().pairs()
    train_reward_model(
        args,
        model=ensure_model(args.task, args.model_name_or_path),
        train_dataset=pairs,
        eval_dataset=held_out,
    )


def make_trainer(recipe: Path, flags: Sequence[str]) -> PolicyGradientTrainer:
    """The trainer that a recipe file asks for by its key `algorithm`, on its task."""
    trainer_type = TRAINERS[_algorithm(recipe)]
    args = _config(trainer_type.config_type, recipe, flags)
    task = TASKS[args.task]()
    return trainer_type(
        model=ensure_model(args.task, args.model_name_or_path),
        reward_funcs=task.rewards(args.reward_model_name_or_path),
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )


def _config(config_type: type[C], recipe: Path, flags: Sequence[str]) -> C:
    return parse(config_type, ["--config", str(recipe), *flags], f"rlhf-pg train {recipe}")


def _algorithm(recipe: Path, others: Sequence[str] = ("sft", "reward_model")) -> str:
    """The key `algorithm`, which here is that of a trainer; elsewhere `others` are known, too."""
    algorithm = load(recipe).get("algorithm")
    if not isinstance(algorithm, str) or algorithm not in TRAINERS:
        known = ", ".join([*others, *TRAINERS])
        fail(f"{recipe}: the key algorithm must be one of {known}, got {short_repr(algorithm)}")
    return algorithm
