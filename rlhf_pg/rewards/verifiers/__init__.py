"""Ready-made rewards by name: answers that can be checked, the shape of a text, programs.

Each is a function of what was said, with its options as keyword arguments; it returns a score per
completion, None where it does not apply.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.config.fields import checked_options
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.rewards.verifiers.answers import (
    exact,
    format,
    json_schema,
    length,
    numeric,
    regex,
    repetition,
)
from rlhf_pg.rewards.verifiers.code_tests import code
from rlhf_pg.rewards.verifiers.math_answers import math
from rlhf_pg.rewards.verifiers.texts import Said

VERIFIERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (math, exact, numeric, regex, json_schema, format, length, repetition, code)
}


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A ready-made reward with its options; `opened`: see `Said`."""

    name: str
    options: Mapping[str, Any]
    opened: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return one score per completion; None where the reward does not apply."""
        said = Said(self.name, completions, completion_ids, columns, self.opened)
        scores: list[float | None] = VERIFIERS[self.name](said, **self.options)
        return scores


def make_verifier(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """Make a ready-made reward.

    Args:
        name: a key of `VERIFIERS`.
        options: its keyword arguments, and `opened`.

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
        own = dict(options or {})
        opened = bool(own.pop("opened", False))
        made = Verifier(name, checked_options(VERIFIERS[name], own), opened)
        made([], [], [])  # which finds what is wrong with the options together
    except ValueError as error:
        raise ValueError(f"reward {name}: {quoted(str(error))}") from error
    return made
