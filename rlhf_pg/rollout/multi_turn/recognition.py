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

    Ours have a `step`, and a `reset` that needs the row as one argument. Those of TRL have a
    `reset` that takes columns by name, and public methods that are tools. An instance is made to
    look at, unless the factory is a class of ours.

    Args:
        factory: a callable, or TRL's dictionary of callables by the name in a row.

    Raises:
        ValueError: it is no factory, cannot be called, or makes something else.
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
    """Return whether an instance, or a class (then `itself` stands for one), is of our kind."""
    try:
        step, reset = environment.step, environment.reset
    except Exception:  # it has none, or raises anything
        return False
    if not callable(step) or not callable(reset):
        return False
    try:
        signature = inspect.signature(reset)
    except (TypeError, ValueError):  # it has none
        return True
    return _takes(signature, *itself, {}) and not _takes(signature, *itself)


def _takes(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


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
