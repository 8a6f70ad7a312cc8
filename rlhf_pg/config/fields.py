"""Config keys, each with a type, a default, a range and a help text; pydantic checks them."""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import date
from functools import partial, wraps
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.dataclasses import dataclass, rebuild_dataclass

from rlhf_pg.boundary.quoted import show
from rlhf_pg.config.foreign_keys import VALUE_REASONS, unknown

C = TypeVar("C")
V = TypeVar("V")
CHECKS = ConfigDict(
    extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, defer_build=True
)
LIMITS = ("ge", "gt", "le", "lt")
PYDANTIC = re.compile(r"^Input should be |^Value error, |, (?:unable to parse|got) .*")


class Effect(NamedTuple):
    """Whether a resumed run may change a key, and whether replay may show a step with another."""

    resume: Literal["free", "warned", "fixed"]
    replay: Literal["computed", "other run", "none"]  # none: a step does not depend on it


EFFECTS = {
    "output": Effect("free", "none"),  # what a run writes, and where
    "evaluation": Effect("free", "none"),
    "cost": Effect("free", "computed"),  # time and memory, never a result
    "later": Effect("warned", "computed"),  # learning rates of later steps
    "rewards": Effect("warned", "computed"),  # the scores, by calling their sources again
    "update": Effect("fixed", "computed"),  # what becomes of completions and their scores
    "inputs": Effect("free", "other run"),  # models and rows, which have fingerprints; code
    "run": Effect("fixed", "other run"),  # what is sampled, and by what
}


def option(
    default: Any,
    effect: str = "",
    *,
    help: str = "",
    needs: str = "",
    bias: str | None = "",
    replaced_by: str = "",
    names: Collection[str] = (),
    **limits: float,
) -> Any:
    """Declare a key. What it does not say, except limits, it has from the key that it overrides.

    Args:
        effect: one of `EFFECTS`; without one it is an update.
        needs: what else must be set for it to have an effect: "KEY", "KEY VALUE", joined by " or "
            and " and ".
        bias: how it biases the expected gradient, which `audit` measures without it; or another
            key, and both are changed together. None: `audit` leaves it out.
        replaced_by: keys whose flags reset it to its default in a recipe.
        names: allowed values, to which users may add by registering; `rules` checks them.
        limits: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    stated = {
        "effect": effect,
        "help": help,
        "needs": needs,
        "replaced_by": replaced_by,
        "names": tuple(names),
    }
    metadata: dict[str, Any] = {word: value for word, value in stated.items() if value}
    if bias != "":
        metadata["bias"] = bias
    metadata |= limits
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Make a class a config: a pydantic dataclass that raises ConfigError for wrong keys."""
    inherited = getattr(cls, "__dataclass_fields__", {})
    for name, hint in inspect.get_annotations(cls, eval_str=True).items():
        if hint in (int, float, int | None, float | None):
            cls.__annotations__[name] = Annotated[hint, BeforeValidator(_number)]
        if name in inherited and name in vars(cls):
            default = vars(cls)[name]
            key = default if isinstance(default, dataclasses.Field) else option(default)
            words = {word: x for word, x in inherited[name].metadata.items() if word not in LIMITS}
            key.metadata = MappingProxyType({**words, **key.metadata})
            setattr(cls, name, key)
    made: Any = dataclass(cls, kw_only=True, config=CHECKS)
    validate = made.__init__

    @wraps(validate)
    def __init__(self: Any, **values: Any) -> None:
        if not made.__pydantic_complete__:  # slow, and not needed for `--help`
            rebuild_dataclass(made)
            made.__init__ = __init__
        try:
            validate(self, **values)
        except ValidationError as error:
            messages = list(_messages(made, error))
            is_of_rules = not error.errors()[0]["loc"]
        else:
            return
        wrong = {key for key, _ in messages}
        right = {key: value for key, value in values.items() if key not in wrong}
        if not is_of_rules and len(right) < len(values):
            try:  # what the rules say of the other keys, in the same round
                type(self)(**right)
            except ConfigError as error:
                for key, text in error.messages:
                    if not wrong & set(re.findall(r"\w+", text)):
                        messages.append((key, text))
        raise ConfigError(messages)

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


class ConfigError(ValueError):
    """Keys are wrong; `messages` has pairs of a key and its error, one line each."""

    def __init__(self, messages: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(message for _, message in messages))
        self.messages = messages


def _messages(cls: Any, error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield each wrong key with one line, for all types that pydantic has tried, or for a rule."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors():
        if not detail["loc"]:  # of `__post_init__`
            refusal: Any = detail["ctx"]["error"]
            yield from getattr(refusal, "messages", [("", str(refusal))])
        else:
            details.setdefault(str(detail["loc"][0]), []).append(detail)
    for key, tried in details.items():
        value = tried[0]["input"]
        if tried[0]["type"] == "unexpected_keyword_argument":
            yield key, unknown(key, cls)
        elif tried[0]["type"] == "missing":
            yield key, f"{key} is required"
        else:
            expected = dict.fromkeys(PYDANTIC.sub("", detail["msg"]) for detail in tried)
            reason = VALUE_REASONS.get((key, str(value)))
            hint = "" if reason is None else f": {reason}"
            yield key, f"{key} must be {' or '.join(expected)}, got {show(value)}{hint}"


def metadata(config: Any) -> dict[str, Any]:
    """Return what each key of a config, or of its class, says of itself."""
    return {field.name: field.metadata for field in dataclasses.fields(config)}


def help_of(words: Any) -> str:
    """Return the help of a key from its metadata."""
    text: str = words.get("help", "")
    if "needs" in words:
        text += f" Needs {words['needs']}."
    return text


def is_set(config: Any, key: str) -> bool:
    """Return whether a key exists and is not at its default."""
    return hasattr(config, key) and bool(getattr(config, key) != default_of(config, key))


def default_of(config: Any, key: str) -> Any:
    """Return the default of a key."""
    field = config.__dataclass_fields__[key]
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


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
    keys: dict[str, Any] = {"__annotations__": {}}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keys["__annotations__"][parameter.name] = hints[parameter.name]
            if parameter.default is not parameter.empty:
                keys[parameter.name] = parameter.default
    kind: Any = config(type(function.__name__, (), keys))
    checked: dict[str, Any] = vars(kind(**options))
    return checked


def bind(function: Callable[..., V], config: Any) -> partial[V]:
    """Bind every parameter of the function that is a key of the config."""
    names = parameters(function) & {field.name for field in dataclasses.fields(config)}
    return partial(function, **{name: getattr(config, name) for name in names})


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)
