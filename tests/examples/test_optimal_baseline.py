"""The baseline of least variance: its weights, and that it leaves the gradient unbiased."""

import pytest
import torch

from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    MAX_LENGTH,
    PROMPTS,
    exact_gradient,
    expected_gradient,
    make_trainer,
)
from tests.examples import load

EXAMPLE = load("optimal_baseline")


@pytest.mark.parametrize("options", [{"num_generations": 2}, {"prompts": ("ab", "bba")}])
def test_expected_gradient_is_exact(options, tmp_path) -> None:
    trainer = make_trainer(EXAMPLE.OptimalBaselineTrainer, tmp_path, **options)
    truth = exact_gradient(trainer)
    assert (-MAX_LENGTH * expected_gradient(trainer) - truth).norm() <= 1e-8 * truth.norm()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "gradient_checkpointing": True}])
def test_optimal_baseline_weights_are_squared_gradient_norms(options, tmp_path) -> None:
    trainer = make_trainer(
        EXAMPLE.OptimalBaselineTrainer,
        tmp_path,
        num_generations=len(COMPLETIONS),
        **options,
    )
    trainer.sampler.engine.says = COMPLETIONS
    squares = trainer.squared_gradients(trainer.sampler.roll_out(range(1)))
    heat = options.get("temperature", 1.0)
    for square, said in zip(squares, COMPLETIONS, strict=True):
        ids = torch.tensor([[*PROMPTS["ab"], *said]])
        logits = trainer.model(ids).logits[0, len(PROMPTS["ab"]) - 1 : -1] / heat
        log_p = logits.log_softmax(-1)[torch.arange(len(said)), torch.tensor(said)].sum()
        gradient = enumeration.gradient(trainer.model, log_p)
        assert square.item() == pytest.approx((gradient @ gradient).item(), rel=1e-9)
    assert all(p.grad is None for p in trainer.model.parameters())
