"""Rewards by name, as a recipe or a flag writes them."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.boundary.user_modules import load
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.rewards.judge import Judge
from rlhf_pg.rewards.remote import HttpReward
from rlhf_pg.rewards.verifiers import VERIFIERS, Verifier, make_verifier

T = TypeVar("T")
Options = Mapping[str, Any]
Reward = Callable[..., Any] | str

MODEL, JUDGE, ADDRESS = "model:", "judge:", ("http://", "https://")
PYTHON = "python:"  # of what was given in Python and has no name by which it could be found
GIVEN = ("prompts", "completions", "completion_ids")  # to every reward function
FORMS = (
    "file.py:FUNCTION, package.module:FUNCTION, model:PATH_OR_HUB_ID, judge:NAME, http://ADDRESS"
)


def named_rewards(
    names: Sequence[str], options: Mapping[str, Options] | None = None
) -> list[Reward]:
    """Make what the names of rewards stand for, in their order.

    - `my_rewards.py:accuracy`, `package.module:accuracy`: a function, see
      `rlhf_pg.boundary.user_modules.load`. Its options are arguments that it gets at every call.
    - `model:PATH_OR_HUB_ID`: a reward model.
    - `http://host:port/path`: a server, see `HttpReward`.
    - `judge:NAME`: see `Judge`; the options of NAME are its rubric, its model and so on.
    - a key of `rlhf_pg.rewards.verifiers.VERIFIERS`: a ready-made reward.

    Args:
        names: as a recipe has them.
        options: of a reward, by its name; for a judge with or without `judge:`.

    Returns:
        For each name a callable whose `__name__` the metrics show, or of a reward model its path or
        Hub id.

    Raises:
        ValueError: a name or an option that is not known, or one that cannot be used.
    """
    for name in names:
        if name.startswith(PYTHON):
            raise ValueError(
                f"reward_funcs has {quoted(name)}, a reward that was given in Python and that no "
                "name finds: give it to the trainer, or write it as a function in a file and name "
                "that, as file.py:NAME"
            )
    given = _by_name(names, options or {})
    return [_reward(name, given.get(name, {})) for name in names]


def describe(names: Sequence[str], rewards: Sequence[Reward]) -> list[str]:
    """Return a line per reward: what code was imported from where, and which address is asked.

    Args:
        names: of the rewards.
        rewards: what `named_rewards` made of them.
    """
    return [
        f"reward {quoted(name)}: {_description(reward)}"
        for name, reward in zip(names, rewards, strict=True)
    ]


# --------------------------------------------------------------------------------- what is meant


def _by_name(names: Sequence[str], options: Mapping[str, Options]) -> dict[str, Options]:
    """Return the options of each reward by its full name.

    Raises:
        ValueError: a name stands twice, or options are of no reward in the list, given twice, or no
            options by name.
    """
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise ValueError(f"reward_funcs names {quoted(repeated)} twice: leave one out")
    found: dict[str, Options] = {}
    for key, own in options.items():
        name = key if key in names else f"{JUDGE}{key}"
        if name not in names:
            raise ValueError(
                f"reward_options has {quoted(str(key))}, which reward_funcs does not name"
                f"{nearest(str(key), names)}; it names {', '.join(map(quoted, names)) or 'nothing'}"
            )
        if name in found:
            raise ValueError(f"reward_options has {quoted(name)} twice: leave one out")
        if not isinstance(own, Mapping):
            raise ValueError(
                f"reward_options of {quoted(name)} must be options by name, got {shown(own)}"
            )
        found[name] = own
    return found


def _reward(name: str, options: Options) -> Reward:
    if name in VERIFIERS:
        return make_verifier(name, options)
    if name.lower().startswith(ADDRESS):
        return _made(name, HttpReward, {"url": name}, options)
    if name.startswith(JUDGE):
        return _judge(name, options)
    if name.startswith(MODEL):
        return _model(name, options)
    if not {".", ":"} & set(name):
        raise ValueError(
            f"there is no reward {shown(name)}{nearest(name, VERIFIERS)}; write {FORMS}, or one of "
            f"{', '.join(VERIFIERS)}"
        )
    return _function(name, load(name), options)


def _judge(name: str, options: Options) -> Judge:
    own = name.removeprefix(JUDGE)
    if not own:
        raise ValueError("judge: has no name: write judge:NAME, and its options in reward_options")
    for needed in ("rubric", "model"):
        if needed not in options:
            raise ValueError(
                f"{quoted(name)} needs {needed}: reward_options: {{{quoted(name)}: {{rubric: ..., "
                "model: ...}}"
            )
    return _made(name, Judge, {"name": own}, options)


def _model(name: str, options: Options) -> str:
    """Return the path or Hub id of a reward model."""
    model = name.removeprefix(MODEL)
    if not model:
        raise ValueError("model: has no name: write model:PATH_OR_HUB_ID")
    if options:
        raise ValueError(f"{quoted(name)} takes no options, got {', '.join(map(quoted, options))}")
    return model


def _function(name: str, function: Any, options: Options) -> Callable[..., Any]:
    """Return a function that has a name, and gets its options at every call."""
    if not options and hasattr(function, "__name__"):
        called: Callable[..., Any] = function
        return called
    if options:
        _check_options(name, options, _arguments(function))
    bound: Any = functools.partial(function, **options)
    bound.__name__ = getattr(function, "__name__", name.replace(":", ".").rpartition(".")[2])
    return bound  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------- options


def _made(name: str, kind: Callable[..., T], own: Options, options: Options) -> T:
    """Make a reward of a class, whose keyword arguments its options are."""
    parameters = inspect.signature(kind).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own]
    _check_options(name, options, known)
    return kind(**own, **options)


def _arguments(function: Any) -> list[str]:
    """Return the arguments that a function names, but for those that every reward gets."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [argument for argument in by_name if argument not in GIVEN]


def _check_options(name: str, options: Options, known: Sequence[str]) -> None:
    for option in options:
        if option not in known:
            raise ValueError(
                f"{quoted(name)} has no option {shown(option)}{nearest(str(option), known)}; its "
                f"options are {', '.join(known) or 'none'}"
            )


# ----------------------------------------------------------------------------- what is said of it


def _description(reward: Reward) -> str:
    match reward:
        case str():
            return f"loads the reward model {quoted(reward)}"
        case HttpReward():
            return f"sends completions to {quoted(reward.asker.url)}"
        case Judge():
            key = f", with the key in {reward.api_key_env}" if reward.api_key_env else ""
            where = quoted(reward.asker.url)
            return f"sends completions to {quoted(reward.model)} at {where}{key}"
        case Verifier():
            return "ready-made"
    function = reward.func if isinstance(reward, functools.partial) else reward
    module = getattr(function, "__module__", type(function).__module__)
    return f"runs code imported from {quoted(_source(module))}"


def _source(module: str) -> str:
    """Return the file of a module, or its name if it has none."""
    return getattr(sys.modules.get(module), "__file__", None) or module
