"""Rebuild the trainer of a run from its config.yaml."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.config.parse import parse
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.rewards.named import PYTHON, make_rewards
from rlhf_pg.trainers import TRAINERS, PolicyGradientTrainer, trainer_type


def rebuild(run: RunFiles, keys: Sequence[str] = ()) -> PolicyGradientTrainer:
    """Make the trainer of a run from its config.yaml, with other keys; else ValueError.

    A reward given in Python that cannot be found by name is not called: its scores are recorded.
    """
    if not run.config:
        raise ValueError(f"{run.directory} holds no run: it lacks config.yaml")
    algorithm = run.config.get("algorithm")
    if algorithm not in TRAINERS:
        raise ValueError(
            f"{run.directory / 'config.yaml'}: the key algorithm must be one of "
            f"{', '.join(TRAINERS)}, got {show(algorithm)}"
        )
    kind = trainer_type(algorithm, run.config.get("trainer"))
    recipe = ["--config", str(run.directory / "config.yaml")]
    args: Any = parse(kind.config_type, [*recipe, *keys], "rlhf-pg replay")
    given = [*args.given_in_python, *["its model"] * (args.model_name_or_path is None)]
    given += ["its data"] * (args.task is None and not args.dataset_name)
    if given:
        how = "make its trainer in Python, and give it to rlhf_pg.replay.replay.Replay"
        raise ValueError(f"the run was given {', '.join(given)} in Python: {how}")
    if not keys:  # the same run, perhaps in another directory now
        args = dataclasses.replace(args, output_dir=str(run.directory))
    names, options, functions = args.reward_funcs, args.reward_options, list[Any]()
    if any(name.startswith(PYTHON) for name in names):
        args = dataclasses.replace(args, reward_funcs=(), reward_options={})
        for name in names:
            own = {name: options[name]} if name in options else {}
            functions += [_missing(name)] if name.startswith(PYTHON) else make_rewards([name], own)
    return kind(args=args, reward_funcs=functions)


def _missing(name: str) -> Any:
    def missing(**_: Any) -> Any:
        raise ValueError(f"{quote(name)} was given in Python, and is not there to be asked")

    missing.__name__ = name.removeprefix(PYTHON)
    return missing
