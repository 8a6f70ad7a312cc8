"""`rlhf-pg train`, and what the scripts in `recipes/` share with it."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_pg.config import PolicyGradientConfig, RewardModelConfig, SFTConfig
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

TRAINERS: dict[str, type[PolicyGradientTrainer]] = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "rloo": RLOOTrainer,
    "reinforce": ReinforceTrainer,
}


def train(recipe: Path, flags: Sequence[str]) -> None:
    """Train by a recipe file, with the trainer that its key `algorithm` names."""
    algorithm = algorithm_of(recipe, ("sft", "reward_model", *TRAINERS))
    run_recipe(algorithm, ["--config", str(recipe), *flags], f"rlhf-pg train {recipe}")


def run_recipe(algorithm: str, flags: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Read a config and train with it, which is all that a script in `recipes/` does.

    Args:
        algorithm: sft, reward_model, or a name in `TRAINERS`.
        flags: flags of the config; by default those of the command line.
        prog: what `--help` calls the program.
    """
    if algorithm == "sft":
        print(f"saved {warm_start(parse(SFTConfig, flags, prog))}")
    elif algorithm == "reward_model":
        make_reward_model(parse(RewardModelConfig, flags, prog))
    else:
        config_type = TRAINERS[algorithm].config_type
        make_trainer(algorithm, parse(config_type, flags, prog)).train()


def make_reward_model(args: RewardModelConfig) -> None:
    """Train a reward model on the pairs of its task."""
    pairs, held_out = TASKS[args.task]().pairs()
    train_reward_model(
        args,
        model=ensure_model(args.task, args.model_name_or_path),
        train_dataset=pairs,
        eval_dataset=held_out,
    )


def make_trainer(algorithm: str, args: PolicyGradientConfig) -> PolicyGradientTrainer:
    """Make the trainer of an algorithm, on the task that its config names."""
    task = TASKS[args.task]()
    return TRAINERS[algorithm](
        model=ensure_model(args.task, args.model_name_or_path),
        reward_funcs=task.rewards(args.reward_model_name_or_path),
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )


def find_recipe(name: str) -> Path:
    """Return the recipe file of this name, or else the preset."""
    preset = recipe_file(f"presets/{name}.yaml")
    return preset if preset.exists() and not Path(name).exists() else Path(name)


def algorithm_of(recipe: Path, known: Sequence[str]) -> str:
    """Return the key `algorithm` of a recipe file, or `fail` if it is not a known one."""
    algorithm = load(recipe).get("algorithm")
    if not isinstance(algorithm, str) or algorithm not in known:
        names, given = ", ".join(known), short_repr(algorithm)
        fail(f"{recipe}: the key algorithm must be one of {names}, got {given}")
    return algorithm
