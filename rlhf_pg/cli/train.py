"""`rlhf-pg train`, and its parts that the scripts in `recipes/` share."""

from collections.abc import Sequence
from typing import Any

from rlhf_pg.cli.main import explaining_errors, quiet_libraries
from rlhf_pg.cli.recipes import CONFIGS, config_type_of, split_recipe
from rlhf_pg.config.parse import parse


def train(flags: Sequence[str]) -> None:
    """Train with a recipe, by the trainer that the key `algorithm` names."""
    recipes, keys = split_recipe(flags)
    run_recipe(
        config_type_of(recipes, keys, CONFIGS),
        ["--config", *map(str, recipes), *keys],
        "rlhf-pg train",
    )


@explaining_errors()
def run_recipe(
    kind: Any,
    flags: Sequence[str] | None = None,
    prog: str | None = None,
) -> None:
    """Read a config from flags, by default those of the command line, and train with it; `kind` is
    sft, reward_model, a name in `TRAINERS` or a class of configs, and `prog` is for `--help`.
    """
    args = parse(CONFIGS.get(kind, kind), flags, prog)
    quiet_libraries()
    from rlhf_pg.supervised import train_sft
    from rlhf_pg.supervised.bradley_terry import train_reward_model
    from rlhf_pg.tasks import load_task
    from rlhf_pg.tasks.warm_start import ensure_model, warm_start
    from rlhf_pg.trainers import TRAINERS, trainer_type

    if args.algorithm in TRAINERS:
        trainer_type(args.algorithm, args.trainer)(args=args).train()
    elif args.algorithm == "sft":
        # A task makes its own tiny model.
        train_sft(args) if args.task is None else warm_start(args)
    elif args.task is None:
        train_reward_model(args)
    else:
        pairs, held_out = load_task(args.task).pairs()
        model = ensure_model(args.task, args.model_name_or_path)
        others = None if args.eval_dataset_name else held_out
        train_reward_model(args, model=model, train_dataset=pairs, eval_dataset=others)
