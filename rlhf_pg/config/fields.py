"""Config keys, each with a type, a default, a range and a help text; pydantic checks them."""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import date
from functools import cache, partial, wraps
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    TypeVar,
    dataclass_transform,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from typing_extensions import TypedDict

from rlhf_pg.boundary.quoted import show
from rlhf_pg.config.foreign_keys import KEYS, VALUE_REASONS, unknown

C = TypeVar("C")
V = TypeVar("V")
CHECKS = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
SAID = re.compile(r"^Input should be |^Value error, |, (?:unable to parse|got) .*")


def option(default: Any, *, names: Collection[str] = (), help: str = "", **limits: float) -> Any:
    """Declare a key.

    Args:
        names: allowed values, to which users may add by registering; `rules` checks them.
        help: by default the help of the key that it overrides.
        limits: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    metadata = {"help": help, "names": tuple(names), "limits": limits}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Make a class a config: a dataclass that raises ConfigError for wrong keys."""
    inherited = getattr(cls, "__dataclass_fields__", {})
    for name, key in vars(cls).items():
        if isinstance(key, dataclasses.Field) and name in inherited:
            text = key.metadata.get("help") or inherited[name].metadata["help"]
            key.metadata = MappingProxyType({**key.metadata, "help": text})
    is_made = "__dataclass_fields__" in vars(cls)
    made: Any = cls if is_made else dataclasses.dataclass(kw_only=True)(cls)
    assign = made.__init__
    if get_origin(inspect.get_annotations(cls).get("algorithm")) is Literal:
        KEYS[made.algorithm] = {field.name for field in dataclasses.fields(made)}

    @cache
    def checker() -> Any:  # slow, and not needed for `--help`
        hints = get_type_hints(made, include_extras=True)
        keys = {}
        for field in dataclasses.fields(made):
            name = field.name
            hint = hints[field.name]
            keys[name] = Annotated[hint, Field(**field.metadata.get("limits", {}))]
            if hint in (int, float, int | None, float | None):
                keys[name] = Annotated[keys[name], BeforeValidator(_number)]
            if field.default is field.default_factory is dataclasses.MISSING:
                keys[name] = Required[keys[name]]
        kind: Any = TypedDict
        known = kind(made.__name__, keys, total=False)
        known.__pydantic_config__ = CHECKS
        return TypeAdapter(known)

    @wraps(assign)
    def __init__(self: Any, **given: Any) -> None:
        try:
            checked = checker().validate_python(given)
        except ValidationError as error:
            messages = list(_messages(made, error))
            wrong = {key for key, _ in messages}
            rest = {key: value for key, value in given.items() if key not in wrong}
            if len(rest) < len(given):  # what the rules say of the other keys, in the same round
                try:
                    type(self)(**rest)
                except ConfigError as more:
                    messages += [one for one in more.messages if not wrong & {*one[1].split()}]
            raise ConfigError(messages) from None
        assign(self, **checked)

    made.__init__ = __init__
    made.__init__.checks_keys = True
    return made  # type: ignore[no-any-return]


class ConfigError(ValueError):
    """Keys are wrong; `messages` has pairs of a key and its error, one line each."""

    def __init__(self, messages: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(message for _, message in messages))
        self.messages = messages


def _messages(cls: Any, error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield each key that pydantic refuses, with one line for all types that it has tried."""
    known = [field.name for field in dataclasses.fields(cls)]
    found: dict[str, list[Any]] = {}
    for one in error.errors():
        found.setdefault(str(one["loc"][0]), []).append(one)
    for key, ones in found.items():
        if ones[0]["type"] == "extra_forbidden":
            yield key, unknown(key, known)
        elif ones[0]["type"] == "missing":
            yield key, f"{key} is required"
        else:
            said = dict.fromkeys(SAID.sub("", one["msg"]) for one in ones)
            reason = VALUE_REASONS.get((key, str(ones[0]["input"])))
            hint = "" if reason is None else f": {reason}"
            yield key, f"{key} must be {' or '.join(said)}, got {show(ones[0]['input'])}{hint}"


def is_set(config: Any, key: str) -> bool:
    """Return whether a key exists and is not at its default."""
    field = getattr(config, "__dataclass_fields__", {}).get(key)
    if field is None:
        return False
    made = field.default_factory is not dataclasses.MISSING
    return bool(getattr(config, key) != (field.default_factory() if made else field.default))


def as_list(value: Any) -> Any:
    """Turn a value into a list: of one, of none for a flag without a value, or as "[1, 2]" says."""
    if value is True:
        return ()
    if isinstance(value, str) and re.fullmatch(r"\[.+,.+\]", value):  # "[END]" may be in `stop`
        with suppress(yaml.YAMLError):
            return yaml.safe_load(value)
    if isinstance(value, str | float | int | os.PathLike):
        return [value]
    return value


def _number(value: Any) -> Any:
    """Refuse true and false, which pydantic would read as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _read(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(yaml.YAMLError):  # a text is refused below
            value = yaml.safe_load(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError('a mapping such as {"key": "value"}')
    return value or {}


def _share(value: Any) -> Any:
    with suppress(TypeError, ValueError):
        value = float(value)
    if isinstance(value, float) and not 0 < value < 1:
        raise ValueError("a share above 0 and below 1, or the name of a split")
    return value


def _day(value: Any) -> Any:
    try:
        return date.fromisoformat(str(value)).isoformat()  # YAML reads a date as such
    except ValueError:
        raise ValueError("a day such as 2026-11-29") from None


def registry(key: str) -> dict[str, Any]:
    """Return the functions that a key selects by name, including registered ones of users."""
    from rlhf_pg import advantages, losses  # they need torch, which takes seconds

    if key == "advantage_estimator":
        return advantages.ADVANTAGES
    return losses.POLICY_LOSSES


def _registered(value: Any, info: ValidationInfo) -> Any:
    """Register a function that is given in Python, and return its name, MODULE:NAME or, where no
    import finds it again, python:NAME.
    """
    if not callable(value):
        return value
    functions = registry(str(info.field_name))
    module = value.__module__
    label = getattr(value, "__name__", type(value).__name__)
    is_importable = getattr(sys.modules.get(module), label, None) is value
    if module == "__main__" or not is_importable:
        module = "python"
    name = f"{module}:{label}"
    while functions.setdefault(name, value) is not value:  # another of the same name
        name += "_"
    return name


Text = Annotated[str, BeforeValidator(lambda x: os.fspath(x) if isinstance(x, os.PathLike) else x)]
FunctionName = Annotated[Text, BeforeValidator(_registered)]
"""Type of a key that selects a function by its name, or takes one in Python."""
Names = Annotated[tuple[Text, ...], BeforeValidator(as_list)]
"""Type of a key that takes one name or several."""
Day = Annotated[str, BeforeValidator(_day)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(as_list)]
Auto = Annotated[int, BeforeValidator(_number), Field(ge=1)] | Literal["auto"]
Split = Annotated[float | str | None, BeforeValidator(_share)]
Mapping = Annotated[dict[str, V], BeforeValidator(_read)]
"""Type of a key whose value is a mapping; a flag gives it as JSON, or YAML in one line."""


def check_options(function: Callable[..., Any], options: Any) -> dict[str, Any]:
    """Return the keyword-only arguments of a function, checked by its annotations."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = [
        (p.name, hints[p.name], *([] if p.default is p.empty else [p.default]))
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    kind: Any = config(dataclasses.make_dataclass(function.__name__, fields, kw_only=True))
    checked: dict[str, Any] = vars(kind(**options))
    return checked


def bind(function: Callable[..., V], config: Any) -> partial[V]:
    """Bind every parameter of the function that is a key of the config."""
    names = parameters(function) & {field.name for field in dataclasses.fields(config)}
    return partial(function, **{name: getattr(config, name) for name in names})


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)
