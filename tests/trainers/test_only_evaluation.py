"""Evaluation without training: the numbers of a trainer, and nothing in memory that trains."""

import pytest
import torch

from rlhf_pg import GRPOConfig, PPOConfig, PPOTrainer
from rlhf_pg.models import Critic, Reference
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.evaluation import Evaluation
from tests.trainers.conftest import digits

HELD_OUT = arithmetic().eval_dataset.select(range(9))
SIZES = {"num_generations_eval": 3, "max_completion_length": 6}


def test_evaluation_gives_numbers_of_trainer(make, model_path, tmp_path, monkeypatch) -> None:
    options = SIZES | {"beta": 0.1, "output_dir": str(tmp_path / "run"), "temperature": 0.8}
    expected = make(PPOTrainer, eval_dataset=HELD_OUT, **options).evaluate()

    def refuse(*_, **__):
        raise AssertionError("only training needs this")

    for unwanted in (torch.optim.AdamW, Critic, Reference):
        monkeypatch.setattr(unwanted, "__init__", refuse)
    alone = Evaluation(model_path, digits, PPOConfig(**options), HELD_OUT)
    assert alone.evaluate() == pytest.approx(expected, abs=0, rel=0, nan_ok=True)


def test_evaluation_of_adapter_adds_no_other(make, model_path, tmp_path) -> None:
    options = {"use_peft": True, "lora_r": 2, "max_steps": 2, "learning_rate": 0.1, **SIZES}
    trainer = make(eval_dataset=HELD_OUT, **options)
    trainer.train()
    expected = trainer.evaluate()
    adapter = str(tmp_path / "run" / "final")
    alone = Evaluation(adapter, digits, GRPOConfig(use_peft=True, lora_r=2, **SIZES), HELD_OUT)
    assert alone.evaluate() == pytest.approx(expected, nan_ok=True)
    with pytest.raises(ValueError, match="cannot train"):
        alone.train()


def test_data_of_evaluation_are_called_so(model_path) -> None:
    short = GRPOConfig(max_prompt_length=2, **SIZES)
    with pytest.raises(ValueError, match=r"^eval_dataset: .*longer than max_prompt_length 2"):
        Evaluation(model_path, digits, short, HELD_OUT)
