"""Keys of a config as text for a terminal, in groups: the classes that declare them."""

import dataclasses
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

Chosen = Callable[[str, "dataclasses.Field[Any]"], bool]


def of_config(
    config: type, usage: str = "", values: Mapping[str, Any] = {}, chosen: Chosen = lambda *_: True
) -> str:
    """Return the keys of a config class.

    Args:
        usage: what stands above them, a line that says how the command is called.
        values: of a recipe, shown in place of the defaults.
        chosen: which keys are shown, by the group (model, data, run ...) and the field.
    """
    blocks = [f"usage: {usage} [--config RECIPE] [--key value ...]"] if usage else []
    hints = typing.get_type_hints(config)
    for owner, fields in groups(config).items():
        title = owner.__name__.removesuffix("Config").lower()
        lines = [
            line
            for field in fields
            if chosen(title, field)
            for line in _lines(field, hints[field.name], values)
        ]
        if lines:
            about = (owner.__doc__ or "").partition("\n\n")[0]
            blocks.append("\n".join([*textwrap.wrap(f"{title}: {about}", width()), *lines]))
    return "\n\n".join(blocks)


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


def width() -> int:
    """Return the columns that help is written in."""
    return min(100, shutil.get_terminal_size().columns)


def _lines(field: "dataclasses.Field[Any]", hint: Any, values: Mapping[str, Any]) -> Iterator[str]:
    made = field.default_factory is not dataclasses.MISSING
    default = values.get(field.name, "none" if made else field.default)
    names = names_of(field)
    text = field.metadata.get("help", "") + (f" One of: {', '.join(names)}." if names else "")
    yield f"  --{field.name} {' | '.join(kinds(hint))}  (default: {_plain(default)})"
    indent = " " * 6
    yield from textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=indent)


def names_of(field: "dataclasses.Field[Any]") -> list[str]:
    """Return the names that a key may be, if it is one of a registry."""
    info = field.metadata.get("info")
    return list((getattr(info, "json_schema_extra", None) or {}).get("names", ()))


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
