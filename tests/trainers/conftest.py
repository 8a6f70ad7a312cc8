"""A tiny model, a tiny task and a trainer on them, with the native engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import Tensor

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.data.batch import Batch
from rlhf_pg.report.metrics import Meter, step_metrics
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers import PolicyGradientTrainer
from rlhf_pg.trainers.agreement import Agreement
from tests.models.architectures import build

# A few of every length: all of them would be tokenized anew for every trainer.
PROMPTS = Dataset.from_dict(arithmetic().train_dataset[::180])


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model can find at once: the share of even digits."""
    return [sum(c in "02468" for c in text) / 6 for text in completions]


def estimated(
    trainer: PolicyGradientTrainer, says: Sequence[tuple[int, ...]] | None = None
) -> tuple[Batch, dict[str, float]]:
    """The next batch with its advantages, and the metrics; `says` is for a listed engine."""
    if says is not None:
        trainer.sampler.engine.says = says
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    return credited(trainer, trainer.infer(batch))


def credited(trainer: PolicyGradientTrainer, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """A batch with its advantages, and the metrics of that."""
    meter = Meter()
    batch = trainer.credit(batch, meter)
    metrics = batch.metrics | step_metrics(batch, trainer.shaping.names, trainer.gather)
    return batch, metrics | (meter.means(meter.sums()) if meter._sums else {})


def objective_of(trainer: PolicyGradientTrainer, new: Any, batch: Batch) -> Tensor:
    """The objective of an update with this batch alone."""
    return trainer.objective(new, batch, trainer.objective.counts(batch), Meter())


@pytest.fixture
def any_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run train on what no policy sampled, as scripted engines say it."""
    monkeypatch.setattr(Agreement, "excess", lambda *_: None)
    monkeypatch.setattr(Agreement, "_drift", lambda *_: None)


@pytest.fixture
def make(model_path: str, tmp_path: Path) -> Callable[..., PolicyGradientTrainer]:
    """make(GRPOTrainer, reward_funcs=..., learning_rate=..., ...): a trainer ready to train."""
    return maker(model_path, tmp_path)


def of_task(arch: str) -> dict[str, Any]:
    """A model for the tokenizer of the task, and that."""
    _, tokenizer = arithmetic().new_model()
    model = build(arch, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return {"model": model, "processing_class": tokenizer}


def maker(model_path: str, directory: Path) -> Callable[..., PolicyGradientTrainer]:
    """What the fixture `make` is, for runs in another directory than a test's own."""

    def build(
        trainer_type: type[PolicyGradientTrainer] = GRPOTrainer, **options: Any
    ) -> PolicyGradientTrainer:
        inputs = {
            name: options.pop(name, default)
            for name, default in {
                "model": model_path,
                "reward_funcs": digits,
                "train_dataset": PROMPTS,
                "eval_dataset": None,
                "callbacks": None,
                "processing_class": None,
                "peft_config": None,
                "quantization_config": None,
                "reward_processing_classes": None,
                "optimizers": (None, None),
                "tools": None,
                "environment_factory": None,
            }.items()
        }
        if trainer_type is PPOTrainer:
            inputs["value_model"] = options.pop("value_model", None)
        defaults = {
            "max_completion_length": 6,
            "prompts_per_step": 4,
            "num_generations": 4,
            "learning_rate": 1e-3,
            "max_steps": 3,
            "save_steps": 0,
            "output_dir": str(directory / "run"),
        }
        if trainer_type is PPOTrainer:
            defaults["num_iterations"] = 2
        return trainer_type(args=trainer_type.config_type(**(defaults | options)), **inputs)

    return build
