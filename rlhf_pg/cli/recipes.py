"""Recipes by file or by name, for all commands: `COMMAND RECIPE --key value`."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_pg import config
from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.config.parse import fail, load, parse, recipe_file

SUFFIXES = (".yaml", ".yml")
TYPES = (config.GRPOConfig, config.RLOOConfig, config.ReinforceConfig, config.PPOConfig)
WITH_REWARDS: dict[str, Any] = {kind.algorithm: kind for kind in TYPES}
CONFIGS = WITH_REWARDS | {"sft": config.SFTConfig, "reward_model": config.RewardModelConfig}


def split_recipe(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe in the flags, given first or as `--config`, and the other flags."""
    first = flags[0] if flags and not flags[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    known, others = parser.parse_known_args(flags[first is not None :])
    if first is not None and known.config is not None:
        fail(f"there are two recipes, {quote(first)} and --config {known.config}: give one")
    return (first or known.config), others


def find_recipe(name: str | None) -> Path:
    """Return the file, recipe or preset of this name; `fail` if there is none."""
    if name is None:
        fail("a recipe is needed: its file, such as recipes/grpo_arithmetic.yaml, or a preset")
    if Path(name).is_file() or Path(name).suffix in SUFFIXES:
        return Path(name)
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=len(known), cutoff=0.5)
        names = ", ".join(dict.fromkeys([*near, *presets()]))
        fail(f"{quote(name)} is neither a file, a recipe nor a preset; presets are {names}")
    return known[name]


def is_recipe(name: str) -> bool:
    """Return whether a name is a recipe file or a preset, not a model."""
    return Path(name).suffix in SUFFIXES or (not Path(name).is_file() and name in recipes())


def recipes() -> dict[str, Path]:
    """Return the files of the package's recipes by name, including presets."""
    return presets() | {path.stem: path for path in recipe_file("presets").parent.glob("*.yaml")}


def presets() -> dict[str, Path]:
    """Return the files of the presets by name."""
    return {path.stem: path for path in sorted(recipe_file("presets").glob("*.yaml"))}


def config_type_of(recipe: Path, known: Mapping[str, Any] = WITH_REWARDS) -> Any:
    """Return the config class that the key `algorithm` of a recipe names, or `fail`."""
    algorithm: Any = load(recipe).get("algorithm")
    if algorithm not in list(known):
        names = ", ".join(known)
        fail(f"{recipe}: the key algorithm must be one of {names}, got {show(algorithm)}")
    return known[algorithm]


def config_of(recipe: Path, keys: Sequence[str], command: str) -> Any:
    """Return the config of a run with rewards, from a recipe and the flags of a command."""
    return parse(config_type_of(recipe), ["--config", str(recipe), *keys], f"rlhf-pg {command}")


def model_of_run(name: str) -> tuple[str, Path | None]:
    """Return a path or Hub id and its run's `config.yaml`; for a run directory, its `final/`."""
    if Path(name, "state.json").is_file():  # final/, best/ or checkpoints/step-N of a run
        above = (run / "config.yaml" for run in Path(name).absolute().parents[:2])
        return name, next(filter(Path.is_file, above), None)
    recipe, final = Path(name, "config.yaml"), Path(name, "final")
    if not recipe.is_file():
        return name, None
    if not final.is_dir():
        fail(f"{quote(name)} is an unfinished run: resume it, or name its best/ or a checkpoint")
    return str(final), recipe
