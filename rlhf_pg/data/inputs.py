"""The data of a run: arguments in Python come before the keys of its config."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.sources import Loaded, load_datasets, made_prompts


def settle_data(
    args: PolicyGradientConfig,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    environment_factory: Any = None,
    trains: bool = True,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the task, the training rows and the evaluation sets by name, with prompts made.

    Where nothing `trains`, what is evaluated on is taken for the training rows, too. ValueError if
    there are no data, what a key names is not there, or data are given twice.
    """
    given = train_dataset if trains else eval_dataset
    task = None
    if args.task is not None and given is None:
        task = load_task(args.task, args.task_options, args.seed)
    if trains:
        args.refuse_twice("train_dataset", train_dataset, "dataset_name", "task")
        args.refuse_twice("eval_dataset", eval_dataset, "eval_dataset_name", "dataset_test_split")
    is_named = task is not None or bool(args.dataset_name)
    if given is None and (is_named or not trains or environment_factory is None):
        named = named_data(args, task, trains)
    elif trains and args.eval_dataset_name:
        named = load_datasets(args, args.seed, train=False)
    else:  # given in Python, or an environment brings the prompts
        named = Loaded(None, {})
    if eval_dataset is None:
        eval_dataset = named.eval
        if not trains and not eval_dataset:  # nothing is held out: all of it
            eval_dataset = {"": named_data(args, task).train}
    held_out = made_sets(eval_dataset, args)
    if not trains:
        return task, next(iter(held_out.values())), held_out
    train_dataset = named.train if train_dataset is None else train_dataset
    return task, made_prompts(train_dataset, args, "train_dataset"), held_out


def load_task(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """Load a task by its name; `rlhf_pg.tasks` stands above and is imported if one is named."""
    return import_module("rlhf_pg.tasks").load_task(name, options, seed)


def named_data(args: PolicyGradientConfig, task: Any, train: bool = True) -> Loaded:
    """Load the training rows, if any `train`, and the evaluation sets that a config names."""
    if task is None and not args.dataset_name and (train or not args.eval_dataset_name):
        raise ValueError(
            f"no data to {'train' if train else 'evaluate'} on: write dataset_name (a file, a "
            "folder or a Hub id) and reward_funcs, as in docs/your-data.md; or task: arithmetic "
            "for an embedded task"
        )
    loaded = load_datasets(args, args.seed, train)
    if task is None:
        return loaded
    own = {} if task.eval_dataset is None else {"": task.eval_dataset}
    return Loaded(task.train_dataset, loaded.eval or own)


def made_sets(eval_dataset: Any, args: PolicyGradientConfig) -> dict[str, Any]:
    """Make the prompts of evaluation datasets, by name; a single one has the name ""."""
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    return {
        name: made_prompts(data, args, f"eval_dataset {name}".rstrip())
        for name, data in sets.items()
        if data is not None
    }
