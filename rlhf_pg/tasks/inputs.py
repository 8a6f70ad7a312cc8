"""Settle what a run is given: arguments in Python come before the keys of the config."""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_pg.boundary.user_modules import PREFIX
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.files import absolute, located
from rlhf_pg.data.sources import load_datasets, made_prompts
from rlhf_pg.rewards.named import PYTHON, describe, named_rewards
from rlhf_pg.tasks import Task, load_task
from rlhf_pg.tasks.warm_start import ensure_model


class Inputs(NamedTuple):
    """The inputs of a run: of a task by name, of datasets and rewards by name, or as given."""

    model: Any
    train_dataset: Any  # a Dataset or a list of dicts
    eval_datasets: dict[str, Any]  # by name; a single one has the name ""
    reward_funcs: list[Any]
    tools: Sequence[Any]
    environment_factory: Any
    said: list[str]  # lines on where named rewards come from
    recorded: dict[str, Any]  # keys of data and rewards that config.yaml has in place of the config


def settled_inputs(
    args: PolicyGradientConfig,
    model: Any = None,
    reward_funcs: Any = (),
    train_dataset: Any = None,
    eval_dataset: Any = None,
    tools: Sequence[Any] | None = None,
    environment_factory: Any = None,
    trains: bool = True,
) -> Inputs:
    """Settle what a run trains on, from what the trainer is given and else the keys of its config.

    Where nothing `trains`, what is evaluated on is taken for the training data, too. ValueError if
    there are no data or no rewards, what a key names is not there, or data are given twice.
    """
    own_data = (train_dataset if trains else eval_dataset) is not None
    task = None
    if args.task is not None and not own_data:
        task = load_task(args.task, args.task_options, args.seed)
    if trains:
        args.refuse_twice("train_dataset", train_dataset, "dataset_name", "task")
        args.refuse_twice("eval_dataset", eval_dataset, "eval_dataset_name", "dataset_test_split")
        named: dict[str, Any] = {}
        without = environment_factory is not None and not (task or args.dataset_name)
        if train_dataset is None and not without:  # the environment may bring the prompts
            train_dataset, named = named_data(args, task)
        elif args.eval_dataset_name:
            named = load_datasets(args, args.seed, train=False).eval
        eval_dataset = named if eval_dataset is None else eval_dataset
    elif eval_dataset is None:
        eval_dataset = held_out(args, task)
    held = made_sets(eval_dataset, args)
    rewards = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    said, recorded = [], dict[str, Any]()
    if rewards:
        names = {"reward_funcs": tuple(map(name_of, rewards)), "reward_model_name_or_path": None}
        recorded = names | {"reward_options": {}}
    else:  # a reward model, and those by name or the task's own
        by_name = named_rewards(args.reward_funcs, args.reward_options)
        said = describe(args.reward_funcs, by_name)
        own = [] if task is None or by_name else [task.reward]
        rewards = [x for x in (args.reward_model_name_or_path, *by_name, *own) if x is not None]
    if task is not None:
        tools = task.tools if tools is None else tools
        environment_factory = environment_factory or task.environment_factory
    model = model or args.model_name_or_path
    if model is None and task is not None and task.make_tokenizer is not None:
        model = ensure_model(task.name, None)
    return Inputs(
        model,
        made_prompts(train_dataset, args, "train_dataset") if trains else next(iter(held.values())),
        held,
        rewards,
        tools or (),
        environment_factory,
        said,
        recorded if trains or not own_data else recorded | args.without_names(),
    )


def given_again(args: PolicyGradientConfig, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments that are given, which no key of a config can stand for;
    ValueError if one is missing that the run of a recorded config was given.
    """
    given = tuple(
        name
        for name, value in arguments.items()
        if (any(value) if isinstance(value, list | tuple) else value is not None)
    )
    missing = [name for name in args.given_in_python if name not in given]
    if missing:
        raise ValueError(
            f"given_in_python: the run of this config was given {', '.join(missing)} in Python: "
            "give the same to the trainer again, or take the names out of given_in_python"
        )
    return given


def named_data(args: PolicyGradientConfig, task: Task | None) -> tuple[Any, dict[str, Any]]:
    """Load the training rows, and the evaluation sets by name, that a config names."""
    if task is None and not args.dataset_name:
        raise ValueError(
            "no data to train on: write dataset_name (a file, a folder or a Hub id) and "
            "reward_funcs, as in docs/your-data.md; or task: arithmetic for an embedded task"
        )
    loaded = load_datasets(args, args.seed)
    if task is None:
        return loaded.train, loaded.eval
    own = {} if task.eval_dataset is None else {"": task.eval_dataset}
    return task.train_dataset, loaded.eval or own


def held_out(args: PolicyGradientConfig, task: Task | None) -> dict[str, Any]:
    """Return what a config evaluates on, by name: what it holds out, or else all that it names."""
    if task is not None and not args.eval_dataset_name:
        return {"": task.train_dataset if task.eval_dataset is None else task.eval_dataset}
    if not (args.dataset_name or args.eval_dataset_name):
        raise ValueError(
            "no data to evaluate on: write eval_dataset_name or dataset_name (a file, a folder or "
            "a Hub id), or task"
        )
    held = load_datasets(args, args.seed, train=False).eval
    return held or {"": load_datasets(args, args.seed).train}


def made_sets(eval_dataset: Any, args: PolicyGradientConfig) -> dict[str, Any]:
    """Make the prompts of evaluation datasets, by name; a single one has the name ""."""
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    return {
        name: made_prompts(data, args, f"eval_dataset {name}".rstrip())
        for name, data in sets.items()
        if data is not None
    }


def name_of(source: Any) -> str:
    """Return a name for `config.yaml` by which a reward of a run would be found again.

    A function is FILE.py:NAME or MODULE:NAME, a reward model model:PATH, and what no name finds
    python:NAME, which is refused. So is a function of the script that runs: to import that again
    would run it again.
    """
    if isinstance(source, str | PathLike):
        return f"model:{absolute(os.fspath(source), None)}"
    if getattr(source, "config", None) is not None:
        return f"model:{getattr(source.config, '_name_or_path', '')}"
    name = getattr(source, "__name__", type(source).__name__)
    module = getattr(source, "__module__", "")
    code = getattr(source, "__code__", None)
    is_found = getattr(sys.modules.get(module), name, None) is source
    if inspect.isclass(source) or module == "__main__" or not is_found:
        return f"{PYTHON}{name}"
    if not module.startswith(PREFIX):
        return located(f"{module}:{name}", None)
    file = Path(code.co_filename if code is not None else "").absolute()
    return f"{file}:{name}" if file.suffix == ".py" else f"{PYTHON}{name}"
