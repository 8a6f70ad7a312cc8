"""Keys of a config as text for a terminal, in groups: the classes that declare them."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal


def of_config(
    config: type, values: Mapping[str, Any] = {}, keys: Collection[str] | None = None
) -> str:
    """Return the keys of a config class.

    Args:
        values: of a recipe, shown in place of the defaults.
        keys: the keys that are shown; by default all.
    """
    layout = partial(argparse.HelpFormatter, max_help_position=6)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=layout
    )
    hints = typing.get_type_hints(config)
    for owner, fields in groups(config).items():
        title = owner.__name__.removesuffix("Config").lower()
        group = parser.add_argument_group(title, (owner.__doc__ or "").partition("\n\n")[0])
        for field in fields:
            if keys is not None and field.name not in keys:
                continue
            made = field.default_factory is not dataclasses.MISSING
            default = values.get(field.name, "none" if made else field.default)
            text, names = field.metadata.get("help", ""), field.metadata.get("names", ())
            if names:
                text += f" One of: {', '.join(names)}."
            kind = f"{' | '.join(kinds(hints[field.name]))}  (default: {_plain(default)})"
            group.add_argument(f"--{field.name}", metavar=kind, help=text.replace("%", "%%"))
    return parser.format_help().strip()


def groups(config: type) -> dict[type, list["dataclasses.Field[Any]"]]:
    """Return the keys of a config by the most general class that declares them."""
    found: dict[type, list[dataclasses.Field[Any]]] = {}
    fields = {field.name: field for field in dataclasses.fields(config)}
    for owner in config.__mro__[::-1]:
        own = [
            fields.pop(name) for name in vars(owner).get("__annotations__", {}) if name in fields
        ]
        if own:
            found[owner] = own
    return found


def kinds(hint: Any) -> list[str]:
    """Spell a type as a flag has it: `float`, `none`, a word that is meant, `str ...`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for one in inner for kind in kinds(one)]
    if origin is typing.Annotated:
        return kinds(inner[0])
    if origin is Literal:
        return [str(word) for word in inner]
    if origin is tuple:
        return [f"{'|'.join(kinds(inner[0]))} ..."]
    if origin is dict:
        return ["JSON"]
    if hint is bool:
        return ["true", "false"]
    return ["none" if hint is type(None) else hint.__name__]


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value)) or "none"
    return str(value).lower() if isinstance(value, bool | None) else str(value)
