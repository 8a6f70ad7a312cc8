"""Recipes by file or by name, alike for all commands: `COMMAND RECIPE --key value`."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.config.parse import fail, load, recipe_file

SUFFIXES = (".yaml", ".yml")


def split_recipe(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe that flags name, first or as `--config`, and the other flags.

    It fails if there are two.
    """
    first = flags[0] if flags and not flags[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    known, others = parser.parse_known_args(list(flags[first is not None :]))
    if first is not None and known.config is not None:
        fail(
            f"there are two recipes, {quoted(first)} and --config {quoted(known.config)}: give one"
        )
    return (first or known.config), others


def needed_recipe(command: str, flags: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the recipe that a command cannot do without, and the other flags; or `fail`."""
    name, others = split_recipe(flags)
    if name is None:
        fail(
            f"{command} needs a recipe: rlhf-pg {command} recipes/grpo_arithmetic.yaml, or the "
            f"name of a preset (rlhf-pg {command} --help)"
        )
    return find_recipe(name), others


def find_recipe(name: str) -> Path:
    """Return the file, recipe or preset of this name; `fail` if there is none."""
    path = Path(name)
    if path.is_file() or path.suffix in SUFFIXES:
        return path
    known = recipes() | presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=len(known), cutoff=0.5)
        names = ", ".join([*near, *(other for other in presets() if other not in near)])
        fail(f"{quoted(name)} is neither a file, a recipe nor a preset; presets are {names}")
    return known[name]


def is_recipe(name: str) -> bool:
    """Return whether a name is that of a recipe file or a preset, and not of a model."""
    path = Path(name)
    return path.suffix in SUFFIXES or (not path.is_file() and name in recipes() | presets())


def presets() -> dict[str, Path]:
    """Return the files of the presets by name."""
    return {path.stem: path for path in sorted(recipe_file("presets").glob("*.yaml"))}


def recipes() -> dict[str, Path]:
    """Return the files of the package's other recipes by name."""
    return {path.stem: path for path in sorted(recipe_file("presets").parent.glob("*.yaml"))}


def algorithm_of(recipe: Path, known: Iterable[str]) -> str:
    """Return the key `algorithm` of a recipe file, or `fail` if it is not a known one."""
    algorithm, names = load(recipe).get("algorithm"), list(known)
    if algorithm not in names:
        listed = ", ".join(names)
        fail(f"{recipe}: the key algorithm must be one of {listed}, got {shown(algorithm)}")
    return str(algorithm)


def model_of_run(name: str) -> tuple[str, Path | None]:
    """Return a model's path or Hub id; of a run directory, its `final/` and its `config.yaml`.

    It fails if a run has left no model yet.
    """
    directory = Path(name)
    config = directory / "config.yaml"
    if not config.is_file():
        return name, None
    final = directory / "final"
    if not final.is_dir():
        fail(
            f"{quoted(name)} is the directory of a run that has not ended, which has no final/: "
            "resume it, or name a model"
        )
    return str(final), config
