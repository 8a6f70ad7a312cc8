"""Parse configs: defaults < YAML < flags, with all errors at once; and help on their keys."""

import argparse
import dataclasses
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from rlhf_pg.boundary.input_files import read_yaml
from rlhf_pg.boundary.launcher import is_first_process
from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.config.fields import ConfigError, as_list, config, help_of, metadata
from rlhf_pg.config.foreign_keys import algorithms_with, of_verl

logger = logging.getLogger(__name__)

C = TypeVar("C")


def parse(config_type: type[C], args: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Parse a config: defaults < the YAML files given as `--config` < the other flags.

    Of several files the later ones win. In a file for another algorithm, or for none, keys that
    only other algorithms have are left out, so that one file serves all. SystemExit with status 2,
    after a line for each wrong key, with its file if it has one.
    """
    words = list(sys.argv[1:] if args is None else args)
    if {"-h", "--help"} & set(words):
        print(f"usage: {prog or Path(sys.argv[0]).name} [--config RECIPE] [--key value ...]\n")
        print(help_on_keys(config_type))
        raise SystemExit(0)
    kind: Any = config_type
    if "__pydantic_fields__" not in vars(kind):  # a dataclass that is derived from a config
        kind = config(kind)
    known = metadata(kind)
    flags = read_flags(words)
    recipes = as_list(flags.pop("config", ()))
    values = {}
    origin = {}
    for recipe in recipes:
        keys = load(Path(recipe))
        if keys.get("algorithm") != getattr(kind, "algorithm", None):
            idle = [key for key in keys if key not in known and algorithms_with(key, kind)]
            for key in idle:
                del keys[key]
            if idle:
                logger.warning(
                    "%s: left out, since %s has no %s",
                    recipe,
                    kind.algorithm,
                    ", ".join(idle),
                )
        for key, value in keys.items():
            values[str(key)] = value
            origin[str(key)] = f"{recipe}: "
    replacements = replacing(flags)
    for key, of_key in known.items():
        if replacements & {*of_key.get("replaced_by", "").split()}:
            values.pop(key, None)
    for key, value in flags.items():
        values[key] = value
        origin[key] = ""
    for key, value in values.items():
        if value in ("None", "null"):
            values[key] = None
    try:
        made = kind(**values)
    except ConfigError as error:
        fail("\n".join(f"{origin.get(key, '')}{text}" for key, text in error.messages))
    recipe_dir = Path(recipes[0]).absolute().parent if recipes else None
    return made.locate(recipe_dir)  # type: ignore[no-any-return]


def replacing(flags: Mapping[str, Any]) -> set[str]:
    """Return the flags that reset keys of a recipe: what these describe is no longer used."""
    keeps_adapter = str(flags.get("use_peft", True)).lower() not in (
        "false",
        "no",
        "off",
        "0",
    )
    return flags.keys() - ({"use_peft"} if keeps_adapter else set())


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of `--key value`, `--key=value`, `--key a b c` and `--key`."""
    flags: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = flags[name.replace("-", "_")] = [value] if equals else []
        elif "=" in word and "." in word.partition("=")[0] and (message := of_verl([word])):
            fail(message)
        elif flags:
            values.append(word)
        else:
            fail(f"{word!r} is not a key: write --key value")
    for key, values in flags.items():
        if not values:
            flags[key] = True
        elif len(values) == 1:
            flags[key] = values[0]
    return flags


def recipe_file(name: str) -> Path:
    """Return the path of one of our recipes; in a checkout the package has a link to them."""
    return (Path(__file__).parents[1] / "recipes").resolve() / name


def load(path: Path) -> dict[str, Any]:
    """Load the keys of a YAML file; `fail` if it is not valid."""
    try:
        recipe = read_yaml(path)
    except ValueError as error:
        fail(str(error))
    sections = [str(key) for key, value in recipe.items() if isinstance(value, dict)]
    if message := of_verl(sections):
        fail(f"{path}: {message}")
    return recipe


def fail(message: str) -> NoReturn:
    """Print an error, once for all processes, and exit with status 2."""
    if is_first_process():
        for line in message.splitlines():
            is_frame = line.startswith(" ")  # of a traceback
            print(
                "" if is_frame else "error: ",
                visible(line),
                sep="",
                file=sys.stderr,
            )
    raise SystemExit(2)


def dump(config: Any, path: Path) -> None:
    """Write the resolved config as YAML from which `parse` reads the same config."""
    write_file(path, [yaml.safe_dump(dataclasses.asdict(config), sort_keys=False).encode()])


def help_on_keys(config: type, values: Mapping[str, Any] = {}) -> str:
    """Return help on the keys of a config class, with a recipe's values as defaults."""
    form = partial(argparse.HelpFormatter, max_help_position=6)
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=form)
    hints = get_type_hints(config)
    for owner, fields in groups(config).items():
        title = owner.__name__.removesuffix("Config").lower()
        group = parser.add_argument_group(title, (owner.__doc__ or "").partition("\n\n")[0])
        for field in fields:
            made = field.default_factory is not dataclasses.MISSING
            default = values.get(field.name, "none" if made else field.default)
            text = help_of(field.metadata)
            if names := field.metadata.get("names"):
                text += f" One of: {', '.join(names)}."
            if isinstance(default, tuple | list):
                default = " ".join(map(str, default))
            shown = str(default) or "none"
            if shown in ("True", "False", "None"):
                shown = shown.lower()
            kind = f"{' | '.join(kinds(hints[field.name]))}  (default: {shown})"
            group.add_argument(f"--{field.name}", metavar=kind, help=text.replace("%", "%%"))
    return parser.format_help().strip()


def groups(config: type) -> dict[type, list["dataclasses.Field[Any]"]]:
    """Group the keys of a config by the most general class that declares them."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    declared = {}
    for owner in reversed(config.__mro__):
        names = [name for name in inspect.get_annotations(owner) if name in fields]
        if names:
            declared[owner] = [fields.pop(name) for name in names]
    return declared


def kinds(hint: Any) -> list[str]:
    """Return a type as flags show it: `float`, `none`, a literal word, `str ...`."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, UnionType):
        return [kind for one in inner for kind in kinds(one)]
    if origin is Literal:
        return [str(word) for word in inner]
    if origin is tuple:
        return [f"{'|'.join(kinds(inner[0]))} ..."]
    plain = {dict: ["JSON"], bool: ["true", "false"], NoneType: ["none"]}
    return plain.get(origin or hint, [getattr(hint, "__name__", str(hint))])
