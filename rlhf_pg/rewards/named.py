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
from rlhf_pg.rewards.judge import Judge
from rlhf_pg.rewards.remote import HttpReward
from rlhf_pg.rewards.verifiers import VERIFIERS, Verifier, make_verifier

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
    given = {key if key in names else f"{JUDGE}{key}": own for key, own in (options or {}).items()}
    for name in given:
        if name not in names:
            key = name.removeprefix(JUDGE)
            raise ValueError(
                f"reward_options has {quoted(key)}, which reward_funcs does not name"
                f"{nearest(key, names)}; it names {', '.join(map(quoted, names)) or 'nothing'}"
            )
        if not isinstance(given[name], Mapping):
            raise ValueError(
                f"reward_options of {quoted(name)} must be options by name, got "
                f"{shown(given[name])}"
            )
    for i, name in enumerate(names):
        if name.startswith(PYTHON):
            raise ValueError(
                f"reward_funcs has {quoted(name)}, a reward that was given in Python and that no "
                "name finds: give it to the trainer, or write it as a function in a file and name "
                "that, as file.py:NAME"
            )
        if name in names[:i]:
            raise ValueError(f"reward_funcs names {quoted(name)} twice: leave one out")
    return [_reward(name, given.get(name, {})) for name in names]


def _reward(name: str, options: Options) -> Reward:
    if name in VERIFIERS:
        return make_verifier(name, options)
    kind, _, own = name.partition(":")
    if kind == "judge" or name.startswith(ADDRESS):
        made: Any = Judge if kind == "judge" else HttpReward
        try:
            checked = checked_options(made.__init__, options)
            reward: Reward = made(own if kind == "judge" else name, **checked)
        except ValueError as error:
            raise ValueError(f"{quoted(name)}: {error}") from error
        return reward
    if kind == "model":
        if options or not own:
            raise ValueError(f"write model:PATH_OR_HUB_ID, without options, got {quoted(name)}")
        return own
    if not {".", ":"} & set(name):
        raise ValueError(
            f"there is no reward {shown(name)}{nearest(name, VERIFIERS)}; write {FORMS}, or one of "
            f"{', '.join(VERIFIERS)}"
        )
    function = load(name)
    if not options and hasattr(function, "__name__"):
        return function  # type: ignore[no-any-return]
    known = [p for p in inspect.signature(function).parameters if p not in GIVEN] if options else []
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
