"""Keys of the rewards: what scores completions, by name."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pg.config.fields import Checked, found
from rlhf_pg.config.mappings import Mapping

NO_FILES = ("judge", "http", "https", "python")  # before a colon


@dataclass(kw_only=True)
class RewardsConfig(Checked):
    """Keys of the rewards: what scores completions, by name."""

    reward_funcs: tuple[str, ...] = ()
    """Rewards by name: a function in a Python file (my_rewards.py:accuracy) or module, a reward
    model (model:PATH_OR_HUB_ID), a server (http://127.0.0.1:9000/score), a judge (judge:NAME), or a
    ready-made one such as math, exact or format (see docs/rewards.md)."""
    reward_options: Mapping = field(default_factory=dict)
    """Options of the rewards by name, such as {"length": {"target": 200}}."""
    reward_model_name_or_path: str | None = None
    """Path or Hub id of a sequence-classification model that rewards completions as the first
    source. A task's own reward comes after it: with reward_weights 1 and 0 it is only tracked."""

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = (self.reward_funcs,)
        self.reward_options = self.reward_options or {}
        super().__post_init__()

    def locate(self, beside: Path | None) -> None:
        """Make the names of files absolute: beside the recipe, or else in the working directory."""
        super().locate(beside)
        placed = {name: located(name, beside) for name in self.reward_funcs}
        self.reward_funcs = tuple(placed[name] for name in self.reward_funcs)
        self.reward_options = {
            placed.get(name, name): _with_files(options, beside)
            for name, options in self.reward_options.items()
        }


def located(name: str, beside: Path | None) -> str:
    """Return the name of a reward with its file, model or module made absolute, if it is there.

    A module gets its directory in front: DIRECTORY/package.module:function.
    """
    kind, _, model = name.partition(":")
    if kind == "model":
        return f"model:{found(model, beside) or model}"
    place = name.rpartition(":" if ":" in name else ".")[0]
    if not place or kind in NO_FILES or place.partition(".")[0] in sys.stdlib_module_names:
        return name
    if place.endswith(".py"):
        return (found(place, beside) or place) + name.removeprefix(place)
    stem = place.replace(".", "/")
    for file in (f"{stem}.py", f"{stem}/__init__.py"):
        if path := found(file, beside):
            return path.removesuffix(file) + name
    return name


def is_file_name(rubric: Any) -> bool:
    """Return whether a judge's rubric is the name of a file that holds it."""
    text = rubric.strip() if isinstance(rubric, str) else ""
    return "\n" not in text and text.endswith((".md", ".txt"))


def _with_files(options: Any, beside: Path | None) -> Any:
    """Make a judge's files absolute: its rubric, if it is one, and its cache, which may be new."""
    if not isinstance(options, dict):
        return options
    files = {}
    rubric, cache = options.get("rubric", ""), options.get("cache")
    if is_file_name(rubric) and (path := found(rubric.strip(), beside)):
        files["rubric"] = path
    if isinstance(cache, str):
        files["cache"] = found(cache, beside) or os.path.abspath(os.path.expanduser(cache))
    return options | files
