"""Keys of the rewards: what scores completions, by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pg.config.data import found
from rlhf_pg.config.fields import Checked
from rlhf_pg.config.mappings import Mapping

LONGEST_NAME = 1000  # characters of a file's name; what is longer is text


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
        placed = {name: _located(name, beside) for name in self.reward_funcs}
        self.reward_funcs = tuple(placed[name] for name in self.reward_funcs)
        self.reward_options = {
            placed.get(name, name): _with_rubric(options, beside)
            for name, options in self.reward_options.items()
        }


def _located(name: str, beside: Path | None) -> str:
    """Make the file in `file.py:function` or `model:PATH` absolute, if it is there."""
    if name.startswith("model:"):
        return f"model:{found(name.removeprefix('model:'), beside) or name.removeprefix('model:')}"
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py") and (path := found(file, beside)):
        return f"{path}:{function}"
    return name


def _with_rubric(options: Any, beside: Path | None) -> Any:
    """Make the file of a judge's rubric absolute, if it is one."""
    rubric = options.get("rubric") if isinstance(options, dict) else None
    if not isinstance(rubric, str) or len(rubric) > LONGEST_NAME or "\n" in rubric:
        return options
    path = found(rubric, beside)
    return options if path is None else {**options, "rubric": path}
