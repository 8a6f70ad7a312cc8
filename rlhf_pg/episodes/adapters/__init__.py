"""Adapters of other libraries: `load_task` for verifiers and OpenEnv, `TrlEnvironments`."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from datasets import Dataset

from rlhf_pg.boundary.quoted import show, tell
from rlhf_pg.boundary.user_modules import admit, paths_of
from rlhf_pg.episodes.adapters.of_trl import TrlEnvironments as TrlEnvironments
from rlhf_pg.episodes.tools import EnvironmentSource

VERSIONS = {"verifiers": ">=0.3,<0.4", "openenv": ">=0.10"}


class AdaptedTask(NamedTuple):
    """A task as arguments of a trainer."""

    train_dataset: Dataset  # has a column `prompt`
    eval_dataset: Dataset | None
    environment_factory: EnvironmentSource  # its environments give rewards, and may have tools


def load_task(name: str, options: Mapping[str, Any] | None = None, seed: int = 0) -> AdaptedTask:
    """Load a task of another library.

    Args:
        name: `verifiers:ENV_ID`, an installed environment; or `openenv:URL`, a server's.
        options: arguments of the environment's `load_environment`, or of `of_openenv.load`.
        seed: the random seed of the task.

    Raises:
        ValueError: the library is unknown or not installed, or the task cannot be loaded.
    """
    library, _, source = name.partition(":")
    if library not in VERSIONS or not source:
        raise ValueError(f"there is no task {show(name)}: give verifiers:ENV_ID or openenv:URL")
    try:
        adapter = import_module(f"{__name__}.of_{library}")
    except ImportError as error:
        wanted = f'pip install "{library}{VERSIONS[library]}"'
        raise ValueError(f"{library} is not installed, or another version: {wanted}") from error
    if library == "verifiers":
        module = source.rpartition("/")[2].replace("-", "_")
        admit(name, paths_of(module))
    try:
        return AdaptedTask(*adapter.load(source, seed, **options or {}))
    except TypeError as error:
        raise ValueError(f"task_options of {show(name)}: {tell(error)}") from error
