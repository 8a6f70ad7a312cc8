"""What a task is: prompts to learn from, prompts held out, a reward, and a model to start from."""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that needs nothing from a hub.

    Attributes:
        train_dataset, eval_dataset: columns `prompt` and `answer`, no problem in both.
        reward: `(prompts, completions, completion_ids, **columns)` -> one float per completion.
        new_model: a freshly initialised model and its tokenizer; the seed is torch's.
    """

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward: Callable[..., list[float]]
    new_model: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerFast]]
