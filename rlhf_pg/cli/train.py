"""`rlhf-pg train`, and what the scripts in `recipes/` share with it."""

from collections.abc import Sequence

from rlhf_pg.cli.recipes import algorithm_of, needed_recipe
from rlhf_pg.config import PolicyGradientConfig, RewardModelConfig, SFTConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.supervised import train_sft
from rlhf_pg.supervised.bradley_terry import train_reward_model
from rlhf_pg.tasks import embedded
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


def train(flags: Sequence[str]) -> None:
    """Train by a recipe, with the trainer that its key `algorithm` names."""
    recipe, keys = needed_recipe("train", flags)
    algorithm = algorithm_of(recipe, ("sft", "reward_model", *TRAINERS))
    run_recipe(algorithm, ["--config", str(recipe), *keys], f"rlhf-pg train {recipe}")


def run_recipe(algorithm: str, flags: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Read a config and train with it, which is all that a script in `recipes/` does.

    Args:
        algorithm: sft, reward_model, or a name in `TRAINERS`.
        flags: flags of the config; by default those of the command line.
        prog: what `--help` calls the program.
    """
    if algorithm == "sft":
        fine_tune(parse(SFTConfig, flags, prog))
    elif algorithm == "reward_model":
        make_reward_model(parse(RewardModelConfig, flags, prog))
    else:
        config_type = TRAINERS[algorithm].config_type
        make_trainer(algorithm, parse(config_type, flags, prog)).train()


def fine_tune(args: SFTConfig) -> None:
    """Fine-tune a model on the data that its config names; a task makes its own tiny one."""
    if args.task is None:
        train_sft(args)
    else:
        warm_start(args)


def make_reward_model(args: RewardModelConfig) -> None:
    """Train a reward model on the pairs that its config names."""
    if args.task is None:
        train_reward_model(args)
    else:
        pairs, held_out = embedded(args.task).pairs()
        model = ensure_model(args.task, args.model_name_or_path)
        others = None if args.eval_dataset_name else held_out
        train_reward_model(args, model=model, train_dataset=pairs, eval_dataset=others)


def make_trainer(algorithm: str, args: PolicyGradientConfig) -> PolicyGradientTrainer:
    """Make the trainer of an algorithm, on the data and rewards that its config names."""
    return TRAINERS[algorithm](args=args)
