"""Settle what a run is given: arguments in Python come before the keys of the config."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.sources import PromptMaker, Rows, load_datasets, with_prompts
from rlhf_pg.rewards.named import describe, named_rewards
from rlhf_pg.tasks import Task, load_task
from rlhf_pg.tasks.warm_start import ensure_model

WHAT_TO_WRITE = (
    "no data to train on: write dataset_name (a file, a folder or a Hub id) and reward_funcs, as "
    "in docs/your-data.md; or task: arithmetic for an embedded task"
)


class Inputs(NamedTuple):
    """The inputs of a run: of a task by name, of datasets and rewards by name, or as given."""

    model: Any
    train_dataset: Any  # a Dataset, an IterableDataset or a list of dicts
    eval_datasets: dict[str, Any]  # by name; a single one has the name ""
    reward_funcs: list[Any]
    tools: Sequence[Any]
    environment_factory: Any
    said: list[str]  # lines on where named rewards come from


def settled_inputs(
    args: PolicyGradientConfig,
    model: Any = None,
    reward_funcs: Any = (),
    train_dataset: Any = None,
    eval_dataset: Any = None,
    tools: Sequence[Any] | None = None,
    environment_factory: Any = None,
) -> Inputs:
    """Settle what a run trains on, from its arguments and the keys of its config.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, tools, environment_factory: as given to
            the trainer; what is missing comes from the config.

    Raises:
        ValueError: there are no data or no rewards, or what a key names is not there.
    """
    task = None
    if args.task is not None and train_dataset is None:
        task = load_task(args.task, args.task_options, args.seed)
    brings_prompts = environment_factory is not None and task is None and not args.dataset_name
    if train_dataset is None and not brings_prompts:
        train_dataset, named = named_data(args, task)
        eval_dataset = named if eval_dataset is None else eval_dataset
    rewards, said = _listed(reward_funcs), list[str]()
    if not rewards:
        rewards, said = _named_rewards(args, task)
    if task is not None:
        tools = task.tools if tools is None else tools
        environment_factory = environment_factory or task.environment_factory
    model = model or args.model_name_or_path
    if model is None and task is not None and task.make_tokenizer is not None:
        model = ensure_model(task.name, None)
    return Inputs(
        model,
        made_prompts(train_dataset, args, "train_dataset"),
        {
            name: made_prompts(data, args, "eval_dataset")
            for name, data in by_name(eval_dataset).items()
        },
        rewards,
        tools or (),
        environment_factory,
        said,
    )


def named_data(args: PolicyGradientConfig, task: Task | None = None) -> tuple[Rows, dict[str, Any]]:
    """Load the data that a config names: training rows, and evaluation sets by name.

    Raises:
        ValueError: it names none, or they cannot be loaded.
    """
    if task is not None:
        held_out = {} if task.eval_dataset is None else {"": task.eval_dataset}
        if args.eval_dataset_name:
            held_out = dict(load_datasets(args, args.seed).eval)
        return task.train_dataset, held_out
    if not args.dataset_name:
        raise ValueError(WHAT_TO_WRITE)
    loaded = load_datasets(args, args.seed)
    assert loaded.train is not None
    return loaded.train, dict(loaded.eval)


def recorded(args: PolicyGradientConfig, given: Inputs, own_data: bool) -> dict[str, Any]:
    """Return the keys of data and rewards for `config.yaml`, true for what the run was given.

    Args:
        own_data: the datasets were given in Python, and no key names them.
    """
    keys: dict[str, Any] = {}
    if own_data:
        keys |= args.without_names()
    named = args.reward_funcs or args.reward_model_name_or_path or args.task
    if own_data or not named:
        keys |= {"reward_funcs": names_of(given.reward_funcs), "reward_model_name_or_path": None}
    return keys


def made_prompts(data: Any, args: PolicyGradientConfig, what: str) -> Any:
    """Make the prompts of a dataset as the config says: by a template, with a system message.

    Raises:
        ValueError: a row does not fit; the dataset and the row are named.
    """
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        data = Dataset.from_list(data)
    if not isinstance(data, Dataset | IterableDataset):
        return data  # refused where it is read
    try:
        return with_prompts(data, PromptMaker.of(args))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def by_name(eval_dataset: Any) -> dict[str, Any]:
    """Return evaluation datasets by name; a single one has the name ""."""
    if eval_dataset is None:
        return {}
    return dict(eval_dataset) if isinstance(eval_dataset, Mapping) else {"": eval_dataset}


def _listed(reward_funcs: Any) -> list[Any]:
    one = not isinstance(reward_funcs, list | tuple)
    return [reward_funcs] if one else list(reward_funcs)


def _named_rewards(args: PolicyGradientConfig, task: Task | None) -> tuple[list[Any], list[str]]:
    """Return the rewards that a config names, and a line on each.

    A reward model comes first, then the others by name; where there are none, the task's own.
    """
    model = args.reward_model_name_or_path
    named = named_rewards(args.reward_funcs, args.reward_options)
    own = task.rewards() if task is not None and not named else []
    rewards = [*([model] if model is not None else []), *named, *own]
    return rewards, describe(args.reward_funcs, named)


def names_of(rewards: Any) -> tuple[str, ...]:
    """Return names for `config.yaml` by which the rewards of a run would be found again.

    A function is FILE.py:NAME or MODULE:NAME, a reward model model:PATH, and anything else the name
    of its class.
    """
    return tuple(_name_of(source) for source in _listed(rewards))


def _name_of(source: Any) -> str:
    if isinstance(source, str | PathLike):
        return f"model:{Path(source)}"
    if getattr(source, "config", None) is not None:
        return f"model:{getattr(source.config, '_name_or_path', '')}"
    name = getattr(source, "__qualname__", None) or type(source).__qualname__
    module = getattr(source, "__module__", None) or ""
    code = getattr(source, "__code__", None)
    if code is not None and (module == "__main__" or module.startswith("rlhf_pg_user_")):
        return f"{Path(code.co_filename).absolute()}:{name}"
    return f"{module}:{name}"
