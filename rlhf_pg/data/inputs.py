"""The data of a run: arguments in Python take precedence over config keys."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rlhf_pg.boundary.input_files import read_yaml
from rlhf_pg.boundary.quoted import about
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data.chat import encode
from rlhf_pg.data.rendering import prints_date, set_template
from rlhf_pg.data.sources import Loaded, load_datasets, make_prompts, open_dataset

Config: TypeAlias = PolicyGradientConfig | SupervisedConfig
C = TypeVar("C", bound=PolicyGradientConfig | SupervisedConfig)

logger = logging.getLogger(__name__)


def resolve_data(
    args: PolicyGradientConfig,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    environment_factory: Any = None,
    trains: bool = True,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the task, the training rows and the evaluation sets by name, with their prompts.

    Unless the run `trains`, the evaluation set serves as training rows too. ValueError if there are
    no data, a named dataset does not exist, or data are given twice.
    """
    given = train_dataset if trains else eval_dataset
    task = None
    if args.task is not None and given is None:
        task = load_task(args.task, args.task_options, args.seed)
    if not trains:
        if eval_dataset is None:  # without held-out data, use all
            held_out = load_named_data(args, task, train=False).eval
            eval_dataset = held_out or load_named_data(args, task).train
        sets = make_sets(eval_dataset, args)
        train_dataset = next(iter(sets.values()))
        return task, train_dataset, sets
    args.refuse_twice("train_dataset", train_dataset, "task")
    train_dataset, eval_dataset = load_data(args, train_dataset, eval_dataset, task)
    if train_dataset is not None or environment_factory is None:  # environments bring prompts
        train_dataset = make_prompts(train_dataset, args, "train_dataset")
    return task, train_dataset, make_sets(eval_dataset, args)


def load_task(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """Load a task by its name; imports `rlhf_pg.tasks`, a higher layer, only then."""
    return import_module("rlhf_pg.tasks").load_task(name, options, seed)


def load_data(args: Config, train: Any, held_out: Any, task: Any = None) -> Loaded:
    """Return the given training and evaluation data, or else those that the config names;
    ValueError for both.
    """
    args.refuse_twice("train_dataset", train, "dataset_name")
    args.refuse_twice("eval_dataset", held_out, "eval_dataset_name", "dataset_test_split")
    named = load_named_data(args, task, train is None)
    if train is None:
        train = named.train
    if held_out is None:
        held_out = named.eval
    return Loaded(train, held_out)


def load_named_data(args: Config, task: Any = None, train: bool = True) -> Loaded:
    """Load the training rows, if `train`, and the evaluation sets that a config names."""
    loaded = load_datasets(args, args.seed, train)
    if task is None:
        return loaded
    held_out = loaded.eval
    if not held_out and task.eval_dataset is not None:
        held_out = {"": task.eval_dataset}
    return Loaded(task.train_dataset, held_out)


def make_sets(eval_dataset: Any, args: Config, of_texts: bool = True) -> dict[str, Any]:
    """Make the prompts of evaluation datasets, by name; a single one has the name ""."""
    if not isinstance(eval_dataset, Mapping):
        eval_dataset = {"": eval_dataset}
    sets = {}
    for name, data in eval_dataset.items():
        if data is not None or not name:
            sets[name] = make_prompts(data, args, f"eval_dataset {name}".rstrip(), of_texts)
    return sets


def with_date(args: C, tokenizer: Any, today: str) -> C:
    """Return a config with the date that its chat template prints, if it prints one.

    It is that of the first start of the run in `output_dir`, or of the one to resume, whose
    `config.yaml` records it: on another day the same rows would have other tokens.
    """
    if args.chat_template_date is not None or not prints_date(tokenizer):
        return args
    day = today
    directories = [Path(args.output_dir)]
    if args.resume_from_checkpoint not in (None, "latest"):
        checkpoint = Path(args.resume_from_checkpoint).absolute()
        directories.append(checkpoint.parent.parent)
    for directory in directories:
        file = directory / "config.yaml"
        if file.is_file():
            day = read_yaml(file).get("chat_template_date") or day
    if day != today:
        logger.warning("chat_template_date: templates print %s, as at the run's first start", day)
    args = replace(args, chat_template_date=day)
    set_template(tokenizer, args)
    return args


def load_texts(args: PolicyGradientConfig, tokenizer: Any) -> list[list[int]]:
    """Load the texts of `ptx_dataset_name`, as token ids; ValueError without a column `text`."""
    assert args.ptx_dataset_name is not None  # the rules ask for it
    with about("ptx_dataset_name"):
        rows = open_dataset(args.ptx_dataset_name, None, "train")
        if "text" not in rows.column_names:
            raise ValueError(f"there is no column text in {', '.join(rows.column_names)}")
        texts = []
        for row, text in enumerate(rows["text"]):
            if text:
                ids = encode(text, tokenizer, row, "text")
                texts.append(ids[: 1 + args.max_completion_length])  # nothing predicts the first
    return texts


def check_fingerprint(expected: str | None, fingerprint: str) -> None:
    """Refuse training data with another fingerprint than the expected one, if any (ValueError)."""
    if expected not in (None, fingerprint):
        raise ValueError(
            f"the training data have the fingerprint {fingerprint}, not dataset_fingerprint "
            f"{expected}: data, tokenizer or keys of the text differ; leave it out to train on "
            "these data"
        )
