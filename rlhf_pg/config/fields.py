"""Config fields that know their range, and the check of types and ranges when a config is made."""

import dataclasses
import difflib
import inspect
import math
import operator
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from rlhf_pg.config.foreign_keys import explained, nearest


def number(
    default: float | str | None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    because: str = "",
) -> Any:
    """Declare a numeric field with its range, or with words too; the error ends with `because`."""
    limits = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={**limits, "because": because})


def choice(default: str, options: Collection[str]) -> Any:
    """Declare a field that takes a name in `options`, read late since a registry can grow."""
    return dataclasses.field(default=default, metadata={"options": options})


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 2


@dataclass(kw_only=True)
class Checked:
    """A dataclass that checks its fields, in Python as in YAML.

    Raises:
        ValueError: a type is wrong or a value out of range; the message names the key.
        TypeError: a key is unknown; the message names the key to use.
    """

    def __new__(cls, *unnamed: Any, **given: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        if unnamed:
            raise TypeError(
                f"{cls.__name__}: give every key by its name, such as "
                f"output_dir={short_repr(unnamed[0])}"
            )
        for key in given:
            if key not in known:
                said = explained(key, known) or f"unknown key {key!r}{nearest(key, known)}"
                raise TypeError(f"{cls.__name__}: {said}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked_type(field.name, getattr(self, field.name), hints[field.name])
            _check_range(field, value)
            setattr(self, field.name, value)

    def refuse_idle(self, keys: tuple[str, ...], used: bool, why: str) -> None:
        """Refuse a key that was set but would be ignored.

        Raises:
            ValueError: `used` is False and a key is not at its default; the message names the key
                and ends with `why`.
        """
        for key in () if used else keys:
            if self.is_set(key):
                raise ValueError(f"{key} {why}")

    def locate(self, beside: Path | None) -> None:
        """Make the names of files absolute: beside the recipe, or else in the working directory."""

    def located(self) -> Self:
        """Return the config with the names of files in the working directory made absolute."""
        own = dataclasses.replace(self)
        own.locate(None)
        return own

    def is_set(self, key: str) -> bool:
        """Return whether there is such a key and it is not at its default."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        if key not in fields:
            return False
        factory = fields[key].default_factory
        default = fields[key].default if factory is dataclasses.MISSING else factory()
        return bool(getattr(self, key) != default)


def found(name: str, beside: Path | None) -> str | None:
    """Return the absolute path of a file or folder, looked for beside the recipe and then here."""
    for directory in (beside or Path.cwd(), Path.cwd()) if name else ():
        path = os.path.join(directory, os.path.expanduser(name))
        if os.path.exists(path):
            return os.path.abspath(path)
    return None


def short_repr(value: Any) -> str:
    """Return a short `repr` for an error message, since nested YAML values may be endless."""
    return _SHORT.repr(value)


def bound(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Bind every parameter of the function that is a key of the config."""
    keys = {field.name for field in dataclasses.fields(config)}
    names = inspect.signature(function).parameters
    return partial(function, **{name: getattr(config, name) for name in names if name in keys})


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def _checked_type(name: str, value: Any, hint: Any) -> Any:
    """Return a value of the wanted type: an int may become a float, a list a tuple, a path text."""
    # A union that holds a Literal is always a `typing.Union`.
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            if isinstance(value, list | tuple):
                item = typing.get_args(option)[0]
                return tuple(_checked_type(name, v, item) for v in value)
        elif typing.get_origin(option) is dict:
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                return dict(value)
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
            return float(value)
        elif option is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        elif isinstance(value, option) and not (isinstance(value, bool) and option is not bool):
            return value
    raise ValueError(f"{name} must be {_spelled(hint)}, got {short_repr(value)}")


def _spelled(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Union:
        return " or ".join(_spelled(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return 'a mapping such as {"key": "value"}'
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("NoneType", "None")


def _check_range(field: dataclasses.Field[Any], value: Any) -> None:
    limits = field.metadata
    options = limits.get("options")
    if options is not None and value not in options:
        near = difflib.get_close_matches(value, options, 1, cutoff=0.8)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{field.name} must be one of {', '.join(options)}, got {value!r}{hint}")
    if value is None or isinstance(value, str) or "minimum" not in limits:
        return
    comparisons = {
        "minimum": (operator.ge, "at least"),
        "maximum": (operator.le, "at most"),
        "above": (operator.gt, "above"),
        "below": (operator.lt, "below"),
    }
    for limit, (inside, words) in comparisons.items():
        bound = limits[limit]
        if bound is not None and not inside(value, bound):
            because = f" ({limits['because']})" if limits["because"] else ""
            raise ValueError(f"{field.name} must be {words} {bound}{because}, got {value}")
