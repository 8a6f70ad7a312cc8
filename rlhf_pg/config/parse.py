"""Parser of configs: defaults < YAML < flags.

An unknown key, a wrong type or a value out of range is one error that names the key and the file,
before any model loads.
"""

import argparse
import dataclasses
import io
import itertools
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import docstring_parser
import tyro
import yaml

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.config.fields import short_repr
from rlhf_pg.config.foreign_keys import explained, nearest

C = TypeVar("C")


def parse(config_type: type[C], args: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Parse a config: defaults < the YAML file given as `--config` < the other flags.

    The YAML is read as values: a string in it is one, however much it looks like a flag.

    Args:
        prog: what `--help` calls the program.

    Raises:
        SystemExit: status 2, after one message that names the key and, for YAML, the file.
    """
    recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--config", type=Path)
    known, flags = recipe.parse_known_args(args)
    for key in keys_of(flags):
        _refuse_elsewhere(key, "command line", known=[*typing.get_type_hints(config_type)])
    flags = _with_booleans(flags, config_type)
    from_file = None
    if known.config:
        from_file = _from_file(known.config, config_type, flags)
    config = _cli(config_type, flags, from_file, prog)
    if hasattr(config, "locate"):
        config.locate(known.config.absolute().parent if known.config else None)
    return config


def keys_of(words: Sequence[str]) -> list[str]:
    """Return the keys among the words of a command line, without their values."""
    flags = (word.removeprefix("--") for word in words if word.startswith("--"))
    return [flag.partition("=")[0].replace("-", "_") for flag in flags]


def _with_booleans(flags: Sequence[str], config_type: type[Any]) -> list[str]:
    """Spell the values of boolean keys for tyro: bare `--use_peft` and `true` are True."""
    hints = typing.get_type_hints(config_type).items()
    booleans = {key for key, hint in hints if bool in (hint, *typing.get_args(hint))}
    spelled: list[str] = []
    for word, after in itertools.pairwise([*flags, "--"]):
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and key.replace("-", "_") in booleans:
            bare = not equals and after.startswith("--")
            spelled += [f"--{key}", *(["True"] if bare else [value] if equals else [])]
        else:
            spelled.append(word)
        key = spelled[-2].removeprefix("--").replace("-", "_") if len(spelled) > 1 else ""
        if key in booleans and spelled[-1].lower() in ("true", "false"):
            spelled[-1] = spelled[-1].capitalize()
    return spelled


def _cli(config_type: type[C], flags: Sequence[str], default: C | None, prog: str | None) -> C:
    quiet = nullcontext() if _is_main() else redirect_stderr(io.StringIO())
    _set_help(config_type)
    summary = (config_type.__doc__ or "").partition("\n")[0]
    with _escaping([*flags, *_texts(default)]), quiet:
        return tyro.cli(
            config_type,
            args=flags,
            default=tyro.MISSING_NONPROP if default is None else default,
            prog=prog,
            description=f"{summary}\n\nA recipe is read by --config FILE.yaml; flags override it.",
            use_underscores=True,
            console_outputs=_is_main(),
            config=(tyro.conf.FlagConversionOff,),
        )


def _set_help(config_type: type[Any]) -> None:
    """Give tyro each key's docstring as one line; left alone, it keeps the source's line breaks."""
    texts: dict[str, str] = {}
    for owner in reversed(config_type.__mro__[:-1]):
        for key in docstring_parser.parse_from_object(owner).params:
            texts[key.arg_name] = " ".join((key.description or "").split())
    for field in dataclasses.fields(config_type):
        text = texts.get(field.name, "")
        if options := field.metadata.get("options"):
            text += f" One of: {', '.join(options)}."
        field.metadata = types.MappingProxyType({**field.metadata, "help": text})


@contextmanager
def _escaping(texts: Sequence[str]) -> Iterator[None]:
    """Escape control characters in what tyro prints, if a text holds any; no colours then."""
    if all(visible(text) == text for text in texts):
        yield
        return
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        print(visible(out.getvalue()), end="")
        print(visible(err.getvalue()), end="", file=sys.stderr)


def _texts(config: Any) -> Iterator[str]:
    """Yield the strings among the values of a config, if there is one."""
    for value in vars(config).values() if config is not None else ():
        yield from (
            v for v in (value if isinstance(value, tuple) else [value]) if isinstance(v, str)
        )


def recipe_file(name: str) -> Path:
    """Return the path of a recipe of the package: beside it in a checkout, else inside it."""
    package = Path(__file__).parents[1]
    installed = package / "recipes" / name
    return installed if installed.exists() else package.parent / "recipes" / name


def load(path: Path) -> dict[str, Any]:
    """Load the keys of a YAML file, or `fail` if it is not one."""
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read: {getattr(error, 'strerror', error)}")
    except (yaml.YAMLError, ValueError) as error:  # an impossible date, for example
        fail(f"{path}: not valid YAML: {error}")
    if not isinstance(recipe, dict):
        fail(f"{path}: expected `key: value` lines, got {type(recipe).__name__}")
    return recipe


# A flag for one of these keys takes the place of a recipe's others, which were of what it replaces.
# Another dataset may have the same columns, and be split off likewise; a task has none of it.
_OF_DATASETS = (
    *("task_options", "dataset_config", "dataset_train_split"),
    *("dataset_weights", "dataset_fingerprint"),
)
REPLACED = {
    "dataset_name": ("task", *_OF_DATASETS),
    "task": (
        *("dataset_name", "dataset_test_split", "eval_dataset_name", "dataset_columns"),
        *("prompt_template", *_OF_DATASETS),
    ),
    "eval_dataset_name": ("dataset_test_split",),
    "reward_funcs": ("reward_options", "reward_weights"),
}


def _from_file(path: Path, config_type: type[C], flags: Sequence[str]) -> C:
    """Make the config that a YAML file describes, without keys that a flag takes the place of."""
    recipe = load(path)
    for key in REPLACED.keys() & keys_of(flags):
        for other in REPLACED[key]:
            recipe.pop(other, None)
    hints = typing.get_type_hints(config_type)
    keys = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in recipe.items():
        _refuse_elsewhere(str(key), str(path), known=keys)
        if key not in keys:
            hint = nearest(str(key), keys)
            fail(f"{path}: unknown key {short_repr(key)} for {config_type.__name__}{hint}")
        nullable = typing.get_origin(hints[key]) is dict or type(None) in typing.get_args(
            hints[key]
        )
        if value is None and not nullable:
            fail(f"{path}: {key} must have a value, got null")
        values[key] = _meant(value, hints[key])
    try:
        return config_type(**values)
    except ValueError as error:
        fail(f"{path}: {error}")


def _meant(value: Any, hint: Any) -> Any:
    """Convert a YAML value to the wanted type, if it can be.

    PyYAML reads `1e-5` as a string and a name such as `2026` as a number. A single value may stand
    for a list of one.
    """
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    wanted = typing.get_args(hint) if is_union else (hint,)
    items = [typing.get_args(one)[0] for one in wanted if typing.get_origin(one) is tuple]
    if value is None or (value == "None" and type(None) in wanted):
        return None
    if items:
        return [_meant(item, items[0]) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, str):
        for number in {int, float}.intersection(wanted):
            with suppress(ValueError):
                return number(value)
    elif str in wanted and not isinstance(value, list | dict) and type(value) not in wanted:
        return str(value)
    return value


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice; plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(f"key {twice[0]!r} stands twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _refuse_elsewhere(key: str, where: str, known: Sequence[str] = ()) -> None:
    said = None if key in known else explained(key, known)
    if said is not None:
        fail(f"{where}: {said}")


def fail(message: str) -> NoReturn:
    """Print an error, once for all processes, and exit with status 2."""
    if _is_main():
        print(f"error: {visible(message)}", file=sys.stderr)
    raise SystemExit(2)


def _is_main() -> bool:
    """Return whether this process prints for all; one with a RANK but no launcher is alone."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def dump(config: Any, path: Path) -> None:
    """Write the resolved config as YAML that `parse` reads back to the same config."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
