"""Keys of the data: where prompts, demonstrations and preference pairs come from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pg.config.fields import Checked, found, number
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.mappings import Mapping

EMBEDDED = ("arithmetic", "preference", "guess", "calculator")
THIRD_PARTY = ("reasoning_gym", "verifiers", "openenv")  # before a colon and a name


@dataclass(kw_only=True)
class DataConfig(Checked):
    """Keys of the data: a task by name, or datasets of one's own."""

    task: str | None = None
    """Task by name, which brings data and rewards: one of the embedded arithmetic, preference,
    guess, calculator; or reasoning_gym:NAME, verifiers:NAME or openenv:URL (see
    docs/your-data.md). None takes dataset_name."""
    task_options: Mapping = field(default_factory=dict)
    """Options of a third-party task, such as size or the parameters of its generator."""
    dataset_name: tuple[str, ...] = ()
    """Datasets to train on: a JSONL, JSON, Parquet, CSV or text file, a folder of such, a directory
    of datasets.save_to_disk, or a Hub id. Several are mixed."""
    dataset_config: str | None = None
    """Name of the configuration of a Hub dataset, such as main for openai/gsm8k."""
    dataset_train_split: str = "train"
    """Split to train on, in the syntax of datasets: train, train[:1000]."""
    dataset_test_split: float | str | None = number(None, above=0, below=1, because="as a share")
    """Split to evaluate on; or a share of the training split, such as 0.05, split off by the
    seed."""
    eval_dataset_name: tuple[str, ...] = ()
    """Datasets to evaluate on, if they are others; several are evaluated one by one."""
    dataset_weights: tuple[float, ...] | None = None
    """Weights by which the datasets of dataset_name are mixed; None takes every row once."""
    dataset_columns: Mapping = field(default_factory=dict)
    """Columns of the dataset by what they are here, such as {"prompt": "question"}."""
    prompt_template: str | None = None
    """Text of a prompt with columns in braces, such as "Question: {question}"."""
    system_prompt: str | None = None
    """System message in front of every prompt, which makes prompts of text chats."""
    apply_chat_template: bool = False
    """Make prompts of text chats of one user message, for which the tokenizer has a template."""
    chat_template_kwargs: Mapping = field(default_factory=dict)
    """Arguments of the chat template, such as {"enable_thinking": false}."""
    dataset_fingerprint: str | None = None
    """Fingerprint that the training data must have, as config.yaml records it; None takes any."""

    def __post_init__(self) -> None:
        for key in ("task_options", "dataset_columns", "chat_template_kwargs"):
            setattr(self, key, getattr(self, key) or {})
        for key in ("dataset_name", "eval_dataset_name"):
            names = getattr(self, key)
            setattr(self, key, (str(names),) if isinstance(names, str | Path) else names or ())
        super().__post_init__()
        self._check_task()
        self._check_datasets()
        self._check_prompts()

    def _check_task(self) -> None:
        if self.task is None:
            if self.task_options:
                raise ValueError("task_options is for a task: set task, or leave it out")
            return
        source, colon, name = self.task.partition(":")
        if not (self.task in EMBEDDED or (colon and name and source in THIRD_PARTY)):
            known = [*EMBEDDED, *(f"{one}:NAME" for one in THIRD_PARTY)]
            raise ValueError(
                f"task must be one of {', '.join(known)}, got {self.task!r}"
                f"{nearest(self.task, known)}"
            )
        if self.dataset_name:
            raise ValueError(
                f"task {self.task!r} brings data of its own, and dataset_name names other data: "
                "leave one of them out"
            )
        if self.task in EMBEDDED and self.task_options:
            raise ValueError(f"task_options is for third-party tasks, and {self.task} has none")

    def _check_datasets(self) -> None:
        for key in ("dataset_name", "eval_dataset_name"):
            if "" in getattr(self, key):
                raise ValueError(f"{key} must name a file, a folder or a Hub id, got ''")
        weights = self.dataset_weights
        if weights is not None:
            if len(weights) != len(self.dataset_name):
                raise ValueError(
                    f"dataset_weights must have one number per dataset of dataset_name "
                    f"({len(self.dataset_name)}), got {len(weights)}"
                )
            if min(weights) <= 0:
                raise ValueError(f"dataset_weights must be above 0, got {min(weights)}")
        named, share = self.dataset_name + self.eval_dataset_name, self.dataset_test_split
        of_train = ("dataset_train_split",)
        of_all = ("dataset_config", "dataset_test_split", "dataset_columns")
        why = "is for datasets by name: set dataset_name, or leave it out"
        self.refuse_idle(of_train, bool(self.dataset_name), why)
        self.refuse_idle(of_all, bool(named), why)
        if isinstance(share, float) and self.eval_dataset_name:
            raise ValueError(
                "dataset_test_split as a share splits dataset_name, and eval_dataset_name names "
                "other data: leave one of them out"
            )

    def _check_prompts(self) -> None:
        for ours, theirs in self.dataset_columns.items():
            if not isinstance(theirs, str):
                raise ValueError(
                    f"dataset_columns must map names to names of columns, got {theirs!r} for "
                    f"{ours!r}"
                )

    def refuse_twice(self, argument: str, data: Any, *keys: str) -> None:
        """Refuse data that are given in Python beside keys that name them.

        Raises:
            ValueError: there are data, and one of the keys is set.
        """
        for key in keys if data is not None else ():
            if self.is_set(key):
                raise ValueError(
                    f"the data are given twice, as {argument} in Python and by the key {key}: "
                    "leave one of them out"
                )

    def without_names(self) -> dict[str, Any]:
        """Return the keys that name data, at their defaults."""
        keys = (
            *("task", "task_options", "dataset_name", "dataset_config", "dataset_train_split"),
            *("dataset_test_split", "eval_dataset_name", "dataset_weights", "dataset_columns"),
        )
        defaults = DataConfig()
        return {key: getattr(defaults, key) for key in keys}

    def locate(self, beside: Path | None) -> None:
        """Make the names of files absolute: beside the recipe, or else in the working directory."""
        super().locate(beside)
        for key in ("dataset_name", "eval_dataset_name"):
            names = tuple(found(name, beside) or name for name in getattr(self, key))
            setattr(self, key, names)
