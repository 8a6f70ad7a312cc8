"""Ready-made rewards by name: answers that can be checked, the shape of a text, programs."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.rewards.verifiers.answers import Exact, Numeric, Regex
from rlhf_pg.rewards.verifiers.code_tests import Code
from rlhf_pg.rewards.verifiers.json_schema import JsonSchema
from rlhf_pg.rewards.verifiers.math_answers import Math
from rlhf_pg.rewards.verifiers.shape import Format, Length, Repetition
from rlhf_pg.rewards.verifiers.verifier import Verifier as Verifier

VERIFIERS: dict[str, type[Verifier]] = {
    "math": Math,
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "json_schema": JsonSchema,
    "format": Format,
    "length": Length,
    "repetition": Repetition,
    "code": Code,
}


def make_verifier(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """Make a ready-made reward.

    Args:
        name: a key of `VERIFIERS`.
        options: arguments of that class. A number, a truth value or a list may be given as text.

    Returns:
        A reward function, whose `__name__` is the name.

    Raises:
        ValueError: the name or an option is unknown, an option is missing or out of range, or the
            package or the program that the reward needs is not installed.
    """
    if name not in VERIFIERS:
        there = ", ".join(VERIFIERS)
        raise ValueError(
            f"there is no reward {shown(name)}{nearest(str(name), VERIFIERS)}; those ready-made "
            f"are {there}"
        )
    made, options = VERIFIERS[name], dict(options or {})
    fields = {field.name: field for field in dataclasses.fields(made)}
    for option in options:
        if option not in fields:
            raise ValueError(
                f"reward {name} has no option {shown(option)}{nearest(str(option), fields)}; its "
                f"options are {', '.join(fields)}"
            )
    for field in fields.values():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if no_default and field.name not in options:
            raise ValueError(f"reward {name} needs the option {field.name!r}")
    hints = typing.get_type_hints(made)
    try:
        return made(**{option: _read(value, hints[option]) for option, value in options.items()})
    except ValueError as error:
        raise ValueError(f"reward {name}: {quoted(str(error))}") from error


def _read(value: Any, hint: Any) -> Any:
    """Read text as JSON where something else is wanted: YAML takes 1e-6 for text."""
    options = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if not isinstance(value, str) or str in options:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
