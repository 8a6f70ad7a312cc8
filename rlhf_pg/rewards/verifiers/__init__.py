"""Ready-made rewards by name: answers that can be checked, the shape of a text, programs."""

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
    try:
        return VERIFIERS[name](**dict(options or {}))
    except ValueError as error:
        raise ValueError(f"reward {name}: {quoted(str(error))}") from error
