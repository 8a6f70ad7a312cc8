"""Rewards by name, as a recipe or a flag writes them."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.boundary.user_modules import load
from rlhf_pg.config.fields import checked_options
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.rewards.functions import SAMPLED
from rlhf_pg.rewards.servers import HttpReward, Judge
from rlhf_pg.rewards.verifiers import VERIFIERS, Verifier, make_verifier

Options = Mapping[str, Any]
Reward = Callable[..., Any] | str

JUDGE = "judge:"
PYTHON = "python:"  # of what was given in Python and has no name by which it could be found
FORMS = (
    "file.py:FUNCTION, package.module:FUNCTION, model:PATH_OR_HUB_ID, judge:NAME, http://ADDRESS"
)


def named_rewards(
    names: Sequence[str], options: Mapping[str, Options] | None = None
) -> list[Reward]:
    """Make what the names of rewards stand for: callables, or a path or Hub id of a reward model.

    - `my_rewards.py:accuracy`, `package.module:accuracy`: a function, see
      `rlhf_pg.boundary.user_modules.load`. Its options are arguments that it gets at every call.
    - `model:PATH_OR_HUB_ID`: a reward model.
    - `http://host:port/path`: a server, see `HttpReward`.
    - `judge:NAME`: see `Judge`; the options of NAME are its rubric, its model and so on.
    - a key of `rlhf_pg.rewards.verifiers.VERIFIERS`: a ready-made reward.

    Args:
        names: as a recipe has them.
        options: of a reward, by its name; for a judge with or without `judge:`.

    Raises:
        ValueError: a name or an option that is not known, or one that cannot be used.
    """
    given = {key if key in names else f"{JUDGE}{key}": own for key, own in (options or {}).items()}
    for name in given:
        if name not in names:
            key = name.removeprefix(JUDGE)
            raise ValueError(
                f"reward_options has {quoted(key)}, which reward_funcs does not name"
                f"{nearest(key, names)}; it names {', '.join(map(quoted, names)) or 'nothing'}"
            )
        if not isinstance(given[name], Mapping):
            got = shown(given[name])
            raise ValueError(f"reward_options of {quoted(name)} must be options by name, got {got}")
    for name in names:
        if name.startswith(PYTHON):
            raise ValueError(
                f"reward_funcs has {quoted(name)}, a reward that was given in Python and that no "
                "name finds: give it to the trainer, or name a function in a file (file.py:NAME)"
            )
    return [_reward(name, given.get(name, {})) for name in names]


def _reward(name: str, options: Options) -> Reward:
    kind, _, own = name.partition(":")
    if name in VERIFIERS:
        return make_verifier(name, options)
    if kind == "model":
        if options or not own:
            raise ValueError(f"write model:PATH_OR_HUB_ID, without options, got {quoted(name)}")
        return own
    if kind in ("judge", "http", "https"):
        made, first = (Judge, own) if kind == "judge" else (HttpReward, name)
        try:
            reward: Reward = made(first, **checked_options(made.__init__, options))
        except ValueError as error:
            raise ValueError(f"{quoted(name)}: {error}") from error
        return reward
    if not {".", ":"} & set(name):
        raise ValueError(
            f"there is no reward {shown(name)}{nearest(name, VERIFIERS)}; write {FORMS}, or one of "
            f"{', '.join(VERIFIERS)}"
        )
    function = load(name)
    if not options and hasattr(function, "__name__"):
        return function  # type: ignore[no-any-return]
    parameters = inspect.signature(function).parameters if options else ()
    known = [name for name in parameters if name not in SAMPLED]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{quoted(name)} has no option {shown(option)}{nearest(str(option), known)}; its "
                f"options are {', '.join(known) or 'none'}"
            )
    bound: Any = functools.partial(function, **options)
    bound.__name__ = getattr(function, "__name__", name.replace(":", ".").rpartition(".")[2])
    return bound  # type: ignore[no-any-return]


def describe(names: Sequence[str], rewards: Sequence[Reward]) -> list[str]:
    """Return a line per reward: what code was imported from where, and which address is asked."""
    lines = []
    for name, reward in zip(names, rewards, strict=True):
        match reward:
            case str():
                what = f"loads the reward model {quoted(reward)}"
            case HttpReward():
                what = f"sends completions to {quoted(reward.client.url)}"
            case Judge():
                key = f", with the key in {reward.api_key_env}" if reward.api_key_env else ""
                url = quoted(str(reward.client.base_url))
                what = f"sends completions to {quoted(reward.fields['model'])} at {url}{key}"
            case Verifier():
                what = "ready-made"
            case _:
                function = reward.func if isinstance(reward, functools.partial) else reward
                module = getattr(function, "__module__", type(function).__module__)
                file = getattr(sys.modules.get(module), "__file__", None) or module
                what = f"runs code imported from {quoted(file)}"
        lines.append(f"reward {quoted(name)}: {what}")
    return lines
