"""Help on the keys of a config for the terminal, grouped by the classes that declare them."""

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal


def of_config(config: type, values: Mapping[str, Any] = {}) -> str:
    """Return help on the keys of a config class, with a recipe's values as defaults."""
    form = partial(argparse.HelpFormatter, max_help_position=6)
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=form)
    hints = typing.get_type_hints(config)
    for owner, fields in groups(config).items():
        title = owner.__name__.removesuffix("Config").lower()
        group = parser.add_argument_group(title, (owner.__doc__ or "").partition("\n\n")[0])
        for field in fields:
            made = field.default_factory is not dataclasses.MISSING
            default = values.get(field.name, "none" if made else field.default)
            text, names = field.metadata.get("help", ""), field.metadata.get("names", ())
            text += f" One of: {', '.join(names)}." * bool(names)
            several = default if isinstance(default, tuple | list) else [default]
            shown = " ".join(map(str, several))
            shown = shown.lower() if shown in ("True", "False", "None") else shown or "none"
            kind = f"{' | '.join(kinds(hints[field.name]))}  (default: {shown})"
            group.add_argument(f"--{field.name}", metavar=kind, help=text.replace("%", "%%"))
    return parser.format_help().strip()


def groups(config: type) -> dict[type, list["dataclasses.Field[Any]"]]:
    """Group the keys of a config by the most general class that declares them."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    found = {
        owner: [fields.pop(name) for name in inspect.get_annotations(owner) if name in fields]
        for owner in reversed(config.__mro__)
    }
    return {owner: own for owner, own in found.items() if own}


def kinds(hint: Any) -> list[str]:
    """Return a type as flags show it: `float`, `none`, a literal word, `str ...`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for one in inner for kind in kinds(one)]
    if origin is Literal:
        return [str(word) for word in inner]
    if origin is tuple:
        return [f"{'|'.join(kinds(inner[0]))} ..."]
    plain = {dict: ["JSON"], bool: ["true", "false"], type(None): ["none"]}
    return plain.get(origin or hint, [getattr(hint, "__name__", str(hint))])
