"""Recognition of what an `environment_factory` makes: environments of ours, or those of TRL."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.rollout.multi_turn.environment import (
    EnvironmentFactory,
    EnvironmentSource,
    PlainEnvironments,
)
from rlhf_pg.rollout.multi_turn.trl_environments import TrlEnvironments, TrlFactory

NO_TOOLS = ("reset", "get_reward")


def recognized(factory: Any) -> EnvironmentSource:
    """Find out whose environments a factory makes: ours, or those of TRL.

    Ours have `reset(example)` and `step(completion)`; one of the two names will do. Those of TRL
    have a `reset` that takes columns by name, public methods that are tools, and it may be
    `get_reward`. An instance is made to look at, unless the factory is a class of ours.

    Args:
        factory: a callable, or TRL's dictionary of callables by the name in a row.

    Raises:
        ValueError: it is no factory, cannot be called, or makes something else, or what may be of
            either kind.
    """
    if isinstance(factory, EnvironmentSource):
        return factory
    if isinstance(factory, Mapping):
        if not factory or not all(map(callable, factory.values())):
            raise ValueError(
                "environment_factory must be a factory, or a dictionary of at least one, got "
                f"{shown(factory)}"
            )
        return TrlEnvironments({str(name): _trl(made) for name, made in factory.items()})
    if not callable(factory):
        raise ValueError(
            "environment_factory must be a class or function that makes an environment, got "
            f"{shown(factory)}"
        )
    if inspect.isclass(factory) and _is_ours(factory, None):
        return PlainEnvironments(cast(EnvironmentFactory, factory))
    instance = _made(factory)
    if _is_ours(instance):
        return PlainEnvironments(factory)
    return TrlEnvironments({None: _trl(factory, instance)})


def _is_ours(environment: Any, *itself: Any) -> bool:
    """Return whether an instance, or a class (then `itself` stands for one), is of our kind.

    Raises:
        ValueError: it may be of either.
    """
    try:
        step, reset = environment.step, environment.reset
        pays = callable(getattr(environment, "get_reward", None))
    except Exception:  # it has none, or raises anything
        return False
    if not callable(step) or not callable(reset):
        return False
    named = _first(step, *itself) == "completion" or _first(reset, *itself) == "example"
    if named and not pays:
        return True
    if named or (not pays and _needs_row(reset, *itself)):
        raise ValueError(
            f"environment_factory makes {shown(environment)}, which may be ours or TRL's: ours has "
            "reset(example), step(completion) and no get_reward; TRL's has a reset that takes "
            "columns by name, with defaults or as **row, and tools"
        )
    return False


def _first(method: Any, *itself: Any) -> str | None:
    """Return the name of a method's first argument, if it is known."""
    try:
        return list(inspect.signature(method).parameters)[len(itself)]
    except (TypeError, ValueError, IndexError):
        return None


def _needs_row(reset: Any, *itself: Any) -> bool:
    """Return whether a `reset` cannot be called without one argument."""
    try:
        signature = inspect.signature(reset)
        signature.bind(*itself, {})
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(*itself)
    except TypeError:
        return True
    return False


def _made(factory: Callable[[], Any]) -> Any:
    try:
        with foreign("environment_factory"):
            return factory()
    except Exception as error:
        raise ValueError(
            f"environment_factory cannot make an environment: {told(error)}"
        ) from error


def _trl(factory: Callable[[], Any], sample: Any = None) -> TrlFactory:
    sample = _made(factory) if sample is None else sample
    kind = type(sample)
    functions = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    methods = [name for name in functions if not name.startswith("_") and name not in NO_TOOLS]
    if _is_ours(sample):
        raise ValueError(
            f"environment_factory is a dictionary, which is for TRL's environments, and makes "
            f"{shown(sample)}, which is one of ours: give one factory that chooses in reset"
        )
    if "reset" not in functions or not (methods or "get_reward" in functions):
        raise ValueError(
            f"environment_factory makes {shown(sample)}, which is no environment: ours has "
            "reset(example) and step(completion), TRL's has reset(**row) and documented methods "
            "that are tools"
        )
    return TrlFactory(factory, sample, methods)
