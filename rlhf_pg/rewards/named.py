"""Rewards by name, for recipes and flags."""

import functools
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pg.boundary.quoted import about, quote, show
from rlhf_pg.boundary.user_modules import PREFIX, load
from rlhf_pg.config.fields import check_options
from rlhf_pg.config.files import absolute, locate_reward
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.inputs import RewardsConfig
from rlhf_pg.rewards.functions import ON_REQUEST, SAMPLED, UNCOPIED

Options = Mapping[str, Any]
PYTHON = "python:"  # prefix for rewards given in Python that cannot be found by a name


def resolve_rewards(
    functions: Any, args: RewardsConfig, of_task: Any = None
) -> tuple[list[Any], list[str], dict[str, Any]]:
    """Return the rewards of a run, lines that describe named ones, and keys that `config.yaml` has
    in place of the config's.

    Rewards given in Python take precedence over named ones, and these over a task's.
    """
    rewards = list(functions) if isinstance(functions, list | tuple) else [functions]
    if rewards:
        recorded: dict[str, Any] = {
            "reward_funcs": tuple(map(name_of, rewards)),
            "reward_model_name_or_path": None,
            "reward_options": {},
        }
        return rewards, [], recorded
    named = make_rewards(args.reward_funcs, args.reward_options)
    rewards = [args.reward_model_name_or_path, *(named or [of_task])]
    lines = describe(args.reward_funcs, named)
    return [reward for reward in rewards if reward is not None], lines, {}


def no_reward(completions: Sequence[Any]) -> list[float]:
    """Score nothing: the reward of a run in which only a teacher teaches."""
    return [0.0] * len(completions)


def check_arguments(rewards: Sequence[Any], datasets: Mapping[str, Any], *others: str) -> None:
    """Refuse a function with an argument that is neither the run's nor a column (ValueError)."""
    known = {*SAMPLED, *ON_REQUEST, *UNCOPIED, "trainer_state", *others}
    for what, data in datasets.items():
        if data is None or data.format["type"] == "custom":  # a transform may make other columns
            continue
        columns = [name for name in data.column_names if name != "prompt"]
        taken = [name for name in columns if name in SAMPLED]
        if taken:
            raise ValueError(f"{what}: rename column {taken[0]!r}, an argument of every reward")
        for reward in filter(callable, rewards):
            asked = inspect.signature(reward).parameters.values()
            needed = [p.name for p in asked if p.default is p.empty and str(p)[0] != "*"]
            needed += getattr(reward, "columns", ())
            missing = [name for name in needed if name not in known.union(columns)]
            if missing:
                name = getattr(reward, "__name__", type(reward).__name__)
                raise ValueError(
                    f"reward function {name} needs {missing[0]!r}: there are {', '.join(SAMPLED)} "
                    f"and the columns of {what} ({', '.join(columns) or 'none'}); change its "
                    "signature or its option column, or rename a column by dataset_columns"
                )


def make_rewards(names: Sequence[str], options: Options | None = None) -> list[Any]:
    """Make rewards from their names: callables, or a path or Hub id of a reward model.

    - `my_rewards.py:accuracy`, `package.module:accuracy`: a function, see
      `rlhf_pg.boundary.user_modules.load`. Its options are bound arguments.
    - `model:PATH_OR_HUB_ID`: a reward model.
    - `http://host:port/path`: a server, see `HttpReward`.
    - `judge:NAME`: see `Judge`; its options are under NAME or `judge:NAME`.
    - any other: a ready-made reward, see `rlhf_pg.rewards.verifiers`.

    ValueError if a name or an option is unknown, or cannot be used.
    """
    options = options or {}
    for key, values in options.items():
        if key not in names and f"judge:{key}" not in names:
            raise ValueError(
                f"reward_options has {quote(key)}, which reward_funcs does not name"
                f"{nearest(key, names)}; it names {', '.join(map(quote, names)) or 'nothing'}"
            )
        if not isinstance(values, Mapping):
            got = show(values)
            raise ValueError(f"reward_options of {quote(key)} must be a mapping, got {got}")
    rewards = []
    for name in names:
        of_judge = options.get(name.removeprefix("judge:"), {})
        rewards.append(_reward(name, options.get(name, of_judge)))
    return rewards


def _reward(name: str, options: Options) -> Any:
    kind, _, path = name.partition(":")
    if not {".", ":"} & set(name):
        from rlhf_pg.rewards.verifiers import make_verifier

        return make_verifier(name, options)
    if kind == "model":
        if options or not path:
            raise ValueError(f"write model:PATH_OR_HUB_ID, without options, got {quote(name)}")
        return path
    if name.startswith(PYTHON):
        raise ValueError(
            f"reward_funcs has {quote(name)}, a reward that was given in Python and cannot be "
            "found by name: give it to the trainer, or name a function in a file (file.py:NAME)"
        )
    if kind in ("judge", "http", "https"):
        from rlhf_pg.rewards.servers import HttpReward, Judge

        with about(quote(name)):
            if kind == "judge":
                return Judge(path, **check_options(Judge.__init__, options))
            return HttpReward(name, **check_options(HttpReward.__init__, options))
    function = load(name)
    if not options and hasattr(function, "__name__"):
        return function
    known = [option for option in inspect.signature(function).parameters if option not in SAMPLED]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{quote(name)} has no option {show(unknown[0])}{nearest(str(unknown[0]), known)}; "
            f"its options are {', '.join(known) or 'none'}"
        )
    bound: Any = functools.partial(function, **options)
    bound.__name__ = getattr(function, "__name__", name.replace(":", ".").rpartition(".")[2])
    return bound


def describe(names: Sequence[str], rewards: Sequence[Any]) -> list[str]:
    """Return a line per reward: the code that it runs, or the model or address that it uses."""
    lines = []
    for name, reward in zip(names, rewards, strict=True):
        function = reward.func if isinstance(reward, functools.partial) else reward
        module = getattr(function, "__module__", "")
        if isinstance(reward, str):
            what = f"loads the reward model {quote(reward)}"
        elif where := getattr(reward, "where", None):  # a server's address
            what = f"sends completions to {where}"
        elif module == "rlhf_pg.rewards.verifiers":
            what = "ready-made"
        else:
            file = getattr(sys.modules.get(module), "__file__", None) or module
            what = f"runs code imported from {quote(file)}"
        lines.append(f"reward {quote(name)}: {what}")
    return lines


def name_of(source: Any) -> str:
    """Return the name in `config.yaml` by which a reward can be found again.

    A function is FILE.py:NAME or MODULE:NAME, a reward model model:PATH. A reward that cannot be
    found by name is python:NAME, which is refused later. Functions in the main script are among
    these, since an import would run it again.
    """
    if isinstance(source, str | os.PathLike):
        return f"model:{absolute(os.fspath(source), None)}"
    if getattr(source, "config", None) is not None:
        return f"model:{getattr(source.config, '_name_or_path', '')}"
    name = getattr(source, "__name__", type(source).__name__)
    module = getattr(source, "__module__", "")
    found = getattr(sys.modules.get(module), name, None)
    if inspect.isclass(source) or module == "__main__" or found is not source:
        return f"{PYTHON}{name}"
    if module.startswith(PREFIX):  # loaded from a file
        return f"{sys.modules[module].__file__}:{name}"
    return locate_reward(f"{module}:{name}", None)
