"""One small run with one thing wrong in it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed

from rlhf_pg import GRPOTrainer
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers import Callback, PolicyGradientTrainer

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and the run that meets it.

    Attributes:
        kind: of what the fault is.
        what: it is, for who reads.
        run: the trainer, which is to be trained, of an output directory.
        names: an error has to say one of them.
    """

    kind: str
    what: str
    run: Callable[[Path], PolicyGradientTrainer]
    names: tuple[str, ...]


class Counting(Callback):
    """Notes every step that is taken, in a file: what follows may take the process along."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        with self.file.open("a") as lines:
            lines.write(f"{metrics['step']}\n")


def even_digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward without a fault."""
    return [sum(letter in "02468" for letter in str(said)) / 6 for said in completions]


def small(output: Path, **given: Any) -> PolicyGradientTrainer:
    """A trainer on the embedded task that takes `STEPS` steps, and saves each."""
    task = arithmetic()
    set_seed(0)
    model, tokenizer = task.new_model()
    inputs = {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": even_digits,
        "train_dataset": task.train_dataset.select(range(4)),
    }
    sizes = {
        "max_steps": STEPS,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "micro_batch_tokens": 128,
        "save_steps": 1,
        "log_completions_steps": 1,
    }
    others = {"eval_dataset", "environment_factory", "tools", "peft_config", "callbacks"}
    inputs |= {name: given.pop(name) for name in list(given) if name in inputs or name in others}
    args = GRPOTrainer.config_type(output_dir=str(output), **(sizes | given))
    return GRPOTrainer(args=args, **inputs)
