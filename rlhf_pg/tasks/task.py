"""The parts of a task: training prompts, held-out prompts, rewards, and a model to start from."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse, recipe_file
from rlhf_pg.tasks.tiny import tiny_decoder


class Demonstration(NamedTuple):
    """An episode to imitate: turn, answer, turn, answer, turn; only turns are trained on."""

    prompt: Any  # text or chat messages
    turns: Sequence[str]
    answers: Sequence[Any]  # text or chat messages, one fewer than the turns


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: data with a column `prompt`, and a reward or environments."""

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset | None = None
    make_tokenizer: Callable[[], PreTrainedTokenizerFast] | None = None  # for an embedded task
    max_positions: int = 64  # of the model to start from
    # Arguments of `PolicyGradientTrainer`; no reward if the environment gives rewards.
    reward: Callable[..., list[float]] | None = None
    tools: Sequence[Callable[..., Any]] = ()
    environment_factory: Callable[[], Any] | None = None
    # Episodes for the warm start; None: the training set's prompts and answers.
    demonstrate: Callable[[], list[Demonstration]] | None = None
    # Training and held-out preference pairs, columns `prompt`, `chosen` and `rejected`.
    draw_pairs: Callable[[], tuple[Dataset, Dataset]] | None = None

    def new_model(self) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
        """Make the untrained model of an embedded task, by torch's seed, and its tokenizer."""
        if self.make_tokenizer is None:
            raise ValueError(f"the task {self.name} has no model: set model_name_or_path")
        tokenizer = self.make_tokenizer()
        return tiny_decoder(tokenizer, self.max_positions), tokenizer

    def warm_started_model(self) -> str:
        """Return the path of the task's own model, trained once by `recipes/sft_{task}.yaml` in a
        single separate process, so that it does not depend on the number of processes.
        """
        recipe = ["--config", str(recipe_file(f"sft_{self.name}.yaml"))]
        final = Path(parse(SFTConfig, recipe).output_dir) / "final"
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.parent / "lock-once"):  # "lock" belongs to the training
            if not (final / "model.safetensors").exists():
                print(f"no model at {final}: warm-starting one (once)", flush=True)
                command = [sys.executable, "-m", "rlhf_pg.tasks.warm_start", *recipe]
                subprocess.run(command, env=without_launcher(), check=True)
        return str(final)

    def demonstrations(self) -> list[Demonstration]:
        """Return the episodes that the warm start imitates."""
        if self.demonstrate is not None:
            return self.demonstrate()
        return [Demonstration(row["prompt"], [row["answer"]], []) for row in self.train_dataset]

    def pairs(self) -> tuple[Dataset, Dataset]:
        """Return training and held-out preference pairs (else ValueError)."""
        if self.draw_pairs is None:
            raise ValueError(
                f"the task {self.name} has no preference pairs: use the task preference"
            )
        return self.draw_pairs()
