"""Recipes by file or by name, for all commands: `COMMAND RECIPE --key value`."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_pg import config
from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.config.fields import as_list
from rlhf_pg.config.files import locate_reward
from rlhf_pg.config.parse import (
    fail,
    load,
    parse,
    read_flags,
    recipe_file,
)

SUFFIXES = (".yaml", ".yml")
TYPES = (
    config.GRPOConfig,
    config.RLOOConfig,
    config.ReinforceConfig,
    config.PPOConfig,
)
WITH_REWARDS: dict[str, Any] = {kind.algorithm: kind for kind in TYPES}
CONFIGS = WITH_REWARDS | {
    "sft": config.SFTConfig,
    "reward_model": config.RewardModelConfig,
}


def split_recipe(
    flags: Sequence[str],
) -> tuple[list[Path], list[str]]:
    """Return the recipes in the flags, of which later ones win, and the other flags.

    They are given first or as `--config`; a preset given first wins over the `--config` beside it.
    """
    first = flags[0] if flags and not flags[0].startswith("-") else None
    if first in CONFIGS and first not in recipes():  # an algorithm, for the --config beside it
        return split_recipe([*flags[1:], "--algorithm", first])
    values = read_flags(flags[first is not None :])
    keys = []
    named = list(map(str, as_list(values.pop("config", ()))))
    for key, value in values.items():
        if isinstance(value, list):
            keys += [f"--{key}", *value]
        elif value is True:
            keys.append(f"--{key}")
        else:
            keys.append(f"--{key}={value}")
    if first is not None and named and find_recipe(first) not in presets().values():
        fail(f"there are two recipes, {quote(first)} and --config {named[0]}: give one")
    files = [find_recipe(name) for name in [*named, *([first] if first else [])]]
    if first in presets() and not any("output_dir" in load(file) for file in files):
        keys = ["--output_dir", f"runs/{first}", *keys]
    return files, keys


def find_recipe(name: str) -> Path:
    """Return the file, recipe or preset of this name; `fail` if there is none."""
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
    folder = recipe_file("presets").parent
    return presets() | {path.stem: path for path in folder.glob("*.yaml")}


def presets() -> dict[str, Path]:
    """Return the files of the presets by name."""
    return {path.stem: path for path in sorted(recipe_file("presets").glob("*.yaml"))}


def config_type_of(
    recipes: Sequence[Path],
    flags: Sequence[str] = (),
    known: Mapping[str, Any] = WITH_REWARDS,
) -> Any:
    """Return the config class that `trainer` or `algorithm` names; flags and later recipes win."""
    if not recipes:
        fail("a recipe is needed: its file, such as recipes/grpo_arithmetic.yaml, or a preset")
    values = dict[str, Any]()
    for file in recipes:
        values |= load(file)
    values |= read_flags(flags)
    if name := values.get("trainer"):
        return user_modules.load(locate_reward(str(name), recipes[0].parent), "class").config_type
    if (algorithm := values.get("algorithm")) not in list(known):
        fail(
            f"{recipes[-1]}: the key algorithm must be one of {', '.join(known)}, got "
            f"{show(algorithm)}; or name one before it: grpo --config {recipes[-1]}"
        )
    return known[algorithm]


def config_of(recipes: Sequence[Path], keys: Sequence[str], command: str) -> Any:
    """Return the config of a run with rewards, from recipes and the flags of a command."""
    flags = ["--config", *map(str, recipes), *keys]
    return parse(config_type_of(recipes, keys), flags, f"rlhf-pg {command}")


def check_found(recipe: Path, keys: Sequence[str], trusts: bool) -> None:
    """Let a config that was found in a directory run no code of its own, unless the user `trusts`
    it, or has named the code in the keys.
    """
    if trusts:
        return
    values = read_flags(keys)
    names = set[str]()
    for value in values.values():
        names |= {str(name) for name in as_list(value)}
    # Where the user is: a file of this name beside the config is not meant.
    user_modules.distrust(
        recipe,
        names | {locate_reward(name, None) for name in names},
    )
    if load(recipe).get("trust_remote_code") and "trust_remote_code" not in values:
        user_modules.admit("the code of its models (trust_remote_code)")


def model_of_run(name: str) -> tuple[str, Path | None]:
    """Return a path or Hub id and its run's `config.yaml`; for a run directory, its `final/`."""
    if Path(name, "state.json").is_file():  # final/, best/ or checkpoints/step-N of a run
        above = (run / "config.yaml" for run in Path(name).absolute().parents[:2])
        return name, next(filter(Path.is_file, above), None)
    recipe = Path(name, "config.yaml")
    final = Path(name, "final")
    if not recipe.is_file():
        return name, None
    if not final.is_dir():
        fail(f"{quote(name)} is an unfinished run: resume it, or name its best/ or a checkpoint")
    return str(final), recipe
