"""What a check is, and a group of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

SHORT = "GPU_CHECKS_SHORT"  # an environment variable, set where there is little time


class Result(NamedTuple):
    """What a check has found."""

    figure: str
    passed: bool | None  # None: there was nothing to check
    value: float | None = None


Check = tuple[str, Callable[[], Result]]


@dataclass(frozen=True)
class Group:
    """Checks that one process makes, one after the other, given the device."""

    checks: Callable[[str], Iterator[Check]]
    minutes: float  # it may take
    limit: float = 120.0  # seconds for one check


def within(value: float, bound: float) -> Result:
    """A number that may be so large; NaN is too large."""
    return Result(f"{value:.1e}", value <= bound, value)
