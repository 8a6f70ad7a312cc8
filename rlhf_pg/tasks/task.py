"""What a task is: prompts to learn from, prompts held out, a reward, and a model to start from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that needs nothing from a hub.

    Attributes:
        train_dataset, eval_dataset: columns `prompt` and `answer`, no problem in both.
        reward: `(prompts, completions, completion_ids, **columns)` -> one float per completion.
        new_model: a freshly initialised model and its tokenizer; the seed is torch's.
        draw_pairs: training and held-out preference pairs, columns `prompt`, `chosen` and
            `rejected`; None where the task has none.
    """

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward: Callable[..., list[float]]
    new_model: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerFast]]
    draw_pairs: Callable[[], tuple[Dataset, Dataset]] | None = None

    def rewards(self, reward_model: str | None) -> list[Any]:
        """What a recipe trains on: the reward model first where it names one, then the reward."""
        return [self.reward] if reward_model is None else [reward_model, self.reward]

    def pairs(self) -> tuple[Dataset, Dataset]:
        """Training and held-out preference pairs.

        Raises:
            ValueError: the task has none.
        """
        if self.draw_pairs is None:
            raise ValueError(
                f"the task {self.name} has no preference pairs to train a reward model on: take "
                "the task preference"
            )
        return self.draw_pairs()
