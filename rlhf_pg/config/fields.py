"""Config keys: a type, a default, a range and a text each, checked by pydantic.

A config is a pydantic dataclass, and to its users an ordinary one (`replace`, `asdict`, `fields`,
subclasses). Values from Python, YAML and flags go through the same check, which reports everything
that is wrong at once.
"""

import dataclasses
import inspect
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterator
from functools import partial, wraps
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_type_hints

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from rlhf_pg.config.foreign_keys import explained, nearest

C = TypeVar("C")
SAID = re.compile(r"^Input should be |^Value error, |, (?:unable to parse|got) .*")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 2


def option(default: Any, *, names: Collection[str] = (), help: str = "", **limits: float) -> Any:
    """Declare a key.

    Args:
        names: what it may be, if no user has registered others; `rules` checks it.
        help: by default that of the key which it takes the place of.
        limits: `ge`, `gt`, `le`, `lt`, as pydantic has them.
    """
    metadata = {"help": help, "names": tuple(names), "limits": limits}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Make a class a config.

    Raises (the class it makes):
        ValueError: keys are unknown, of a wrong type or out of range; there is a line for each,
            which names the key.
    """
    hints = inspect.get_annotations(cls)
    inherited = getattr(cls, "__dataclass_fields__", {})
    for name, hint in hints.items():
        declared = vars(cls).get(name)
        if isinstance(declared, dataclasses.Field) and declared.metadata:
            if limits := declared.metadata["limits"]:
                hints[name] = Annotated[hint, Field(**limits)]
            if name in inherited and not declared.metadata["help"]:
                text = inherited[name].metadata["help"]
                declared.metadata = MappingProxyType(declared.metadata | {"help": text})
        if hint in (int, float, int | None, float | None):
            hints[name] = Annotated[hints[name], BeforeValidator(_number)]
    cls.__annotations__ = hints
    options = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
    made: Any = validated(kw_only=True, config=options)(cls)
    check = made.__init__

    @wraps(check)
    def __init__(self: Any, **given: Any) -> None:
        try:
            check(self, **given)
        except ValidationError as error:
            raise ConfigError(list(_messages(type(self), error))) from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


def is_config(cls: type) -> bool:
    """Return whether pydantic checks a class; it does not check an ordinary subclass of one."""
    return "__pydantic_fields__" in vars(cls)


class ConfigError(ValueError):
    """Keys that are wrong: `messages` has pairs of a key and a line that names it."""

    def __init__(self, messages: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(message for _, message in messages))
        self.messages = messages


def _messages(cls: type, error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the keys that pydantic refuses, and why: one line each, whatever types it has tried."""
    known = [field.name for field in dataclasses.fields(cls)]
    found: dict[str, list[Any]] = {}
    for one in error.errors():
        if not one["loc"]:  # by a rule on several keys
            raise one["ctx"]["error"]
        found.setdefault(str(one["loc"][0]), []).append(one)
    for key, ones in found.items():
        if ones[0]["type"] == "unexpected_keyword_argument":
            yield key, explained(key, known) or f"unknown key {key!r}{nearest(key, known)}"
        elif ones[0]["type"] == "missing":
            yield key, f"{key} is needed"
        else:
            said = (SAID.sub("", one["msg"]) for one in ones)
            given = _SHORT.repr(ones[0]["input"])
            yield key, f"{key} must be {' or '.join(dict.fromkeys(said))}, got {given}"


def check_inherited(made: Any) -> None:
    """Check the keys that an ordinary dataclass, a subclass of a config, has inherited."""
    if not is_config(type(made)):
        parent: Any = next(cls for cls in type(made).__mro__ if is_config(cls))
        given = {field.name: getattr(made, field.name) for field in dataclasses.fields(parent)}
        vars(made).update(vars(parent(**given)))


def is_set(config: Any, key: str) -> bool:
    """Return whether there is such a key and it is not at its default."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    if key not in fields:
        return False
    factory: Any = fields[key].default_factory
    default = fields[key].default if factory is dataclasses.MISSING else factory()
    return bool(getattr(config, key) != default)


def listed(value: Any) -> Any:
    """Take a single value for a list of one, and a flag without a value for an empty list."""
    if value is True:
        return ()
    return [value] if isinstance(value, str | float | int | os.PathLike) else value


def _number(value: Any) -> Any:
    """Refuse true and false, which to pydantic are 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _read(value: Any) -> Any:
    if isinstance(value, str):
        value = yaml.safe_load(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError('a mapping such as {"key": "value"}')
    return value or {}


def _share(value: Any) -> Any:
    try:
        share = float(value)
    except (TypeError, ValueError):
        return value
    if not 0 < share < 1:
        raise ValueError("a share above 0 and below 1, or the name of a split")
    return share


Text = Annotated[str, BeforeValidator(lambda x: os.fspath(x) if isinstance(x, os.PathLike) else x)]
Names = Annotated[tuple[Text, ...], BeforeValidator(listed)]
"""Type of a key that takes one name or several."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(listed)]
Auto = Annotated[int, BeforeValidator(_number), Field(ge=1)] | Literal["auto"]
Split = Annotated[float | str | None, BeforeValidator(_share)]
Mapping = Annotated[dict[str, Any], BeforeValidator(_read)]
"""Type of a key whose value is a mapping; a flag gives it as JSON, or YAML in one line."""


def checked_options(function: Callable[..., Any], options: Any) -> dict[str, Any]:
    """Return the keyword-only arguments of a function, checked by its annotations.

    Raises:
        ValueError: an option is unknown, missing, of a wrong type or out of range.
    """
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters.values()
    fields: list[Any] = [
        (p.name, hints[p.name], *([] if p.default is p.empty else [p.default]))
        for p in own
        if p.kind is p.KEYWORD_ONLY
    ]
    kind: Any = config(dataclasses.make_dataclass(function.__name__, fields, kw_only=True))
    checked: dict[str, Any] = vars(kind(**dict(options)))
    return checked


def bound(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Bind every parameter of the function that is a key of the config."""
    keys = {field.name for field in dataclasses.fields(config)}
    names = parameters(function) & keys
    return partial(function, **{name: getattr(config, name) for name in names})


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)
