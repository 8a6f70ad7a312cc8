"""Reading a config: defaults < YAML < flags.

An unknown key, a wrong type or a value out of range is one error that names the key and the file,
before any model loads.
"""

import argparse
import dataclasses
import io
import os
import sys
import typing
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
import yaml

from rlhf_pg.foreign_keys import explained, nearest

C = TypeVar("C")


def parse(config_type: type[C], args: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Read a config: defaults < the YAML file given as `--config` < the other flags.

    The YAML is turned into flags, so that both meet the same types and errors.

    Args:
        prog: what `--help` calls the program.

    Raises:
        SystemExit: status 2, after one message that names the key and, for YAML, the file.
    """
    recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--config", type=Path)
    known, flags = recipe.parse_known_args(args)
    for flag in flags:
        if flag.startswith("--"):
            key = flag.removeprefix("--").split("=")[0].replace("-", "_")
            _refuse_elsewhere(key, "command line")
    from_file = None
    if known.config:
        file_flags = _flags(known.config, config_type)
        try:
            from_file = _cli(config_type, file_flags, None, prog)
        except SystemExit:
            if _is_main():
                print(f"(in {known.config})", file=sys.stderr)
            raise
    return _cli(config_type, flags, from_file, prog)


def _cli(config_type: type[C], flags: Sequence[str], default: C | None, prog: str | None) -> C:
    with nullcontext() if _is_main() else redirect_stderr(io.StringIO()):
        return tyro.cli(
            config_type,
            args=flags,
            default=tyro.MISSING_NONPROP if default is None else default,
            prog=prog,
            use_underscores=True,
            console_outputs=_is_main(),
            config=(tyro.conf.FlagConversionOff,),
        )


def recipe_file(name: str) -> Path:
    """A recipe that comes with the package: beside it in a checkout, inside it when installed."""
    package = Path(__file__).parent
    installed = package / "recipes" / name
    return installed if installed.exists() else package.parent / "recipes" / name


def load(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; exits like `fail` if it is none."""
    try:
        recipe = yaml.load(path.read_text(), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read: {getattr(error, 'strerror', error)}")
    except yaml.YAMLError as error:
        fail(f"{path}: not valid YAML: {error}")
    if not isinstance(recipe, dict):
        fail(f"{path}: expected `key: value` lines, got {type(recipe).__name__}")
    return recipe


def _flags(path: Path, config_type: type) -> list[str]:
    """The keys of a YAML file as `--key=value`."""
    recipe = load(path)
    hints = typing.get_type_hints(config_type)
    keys = [field.name for field in dataclasses.fields(config_type)]
    flags: list[str] = []
    for key, value in recipe.items():
        _refuse_elsewhere(str(key), str(path), known=keys)
        if key not in keys:
            hint = nearest(str(key), keys)
            fail(f"{path}: unknown key {key!r} for {config_type.__name__}{hint}")
        if value is None and type(None) not in typing.get_args(hints[key]):
            fail(f"{path}: {key} must have a value, got null")
        if isinstance(value, list):
            flags += [f"--{key}", *(str(v) for v in value)]
        else:
            flags.append(f"--{key}={value}")
    return flags


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key given twice, of which plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(f"key {twice[0]!r} stands twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _refuse_elsewhere(key: str, where: str, known: Sequence[str] = ()) -> None:
    said = None if key in known else explained(key)
    if said is not None:
        fail(f"{where}: {said}")


def fail(message: str) -> NoReturn:
    """Say what is wrong, once for all processes, and exit with status 2."""
    if _is_main():
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def dump(config: Any, path: Path) -> None:
    """Write the resolved config as YAML that `parse` reads back to the same config."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
