"""TRPO as a user would write it: on public names, with the right Fisher matrix and constraint."""

import pytest
import torch

from rlhf_pg.report.metrics import Meter
from tests.enumeration import PROMPTS, log_probs, make_trainer
from tests.examples import load
from tests.trainers.conftest import estimated


@pytest.fixture(scope="module")
def trpo():
    return load("trpo")


SAID = ((1, 0), (2, 2), (0,))


@pytest.fixture
def make(trpo, tmp_path):
    """A trainer in float64 that has said three completions of "ab", and their experience."""

    def build(**options):
        defaults = {"num_generations": 3, "aggregation": "token_mean", "damping": 0.0}
        trainer = make_trainer(trpo.TRPOTrainer, tmp_path, **(defaults | options))
        return trainer, estimated(trainer, SAID)[0]

    return build


def weights(trainer):
    return torch.nn.utils.parameters_to_vector(trainer.parameters).detach().clone()


def mean_kl(trainer, old, new):
    """Mean over the tokens said of KL(old || new), from plain forward passes."""
    kls = []
    for said in SAID:
        for t in range(len(said)):
            p, q = (next_token(trainer, w, said[:t]) for w in (old, new))
            kls.append((p.exp() * (p - q)).sum())
    torch.nn.utils.vector_to_parameters(old, trainer.parameters)
    return sum(kls) / len(kls)


def next_token(trainer, vector, prefix):
    torch.nn.utils.vector_to_parameters(vector, trainer.parameters)
    ids = torch.tensor([[*PROMPTS["ab"], *prefix]])
    with torch.no_grad():
        return trainer.model(ids).logits[0, -1].log_softmax(-1)


def test_fisher_product_matches_score_outer_product(make):
    """F v = mean over states of sum_y p(y) grad log p(y) (grad log p(y) . v)."""
    trainer, experience = make()
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(weights(trainer)), generator=generator, dtype=torch.float64)
    expected, states = torch.zeros_like(vector), 0
    for said in SAID:
        for t in range(len(said)):
            states += 1
            for token in range(3):
                log_p = log_probs(trainer.model, "ab", (*said[:t], token))[-1]
                score = trainer.flat_gradient(log_p)
                expected += log_p.detach().exp() * score * (score @ vector)
    product = trainer.fisher_product(experience, vector)
    torch.testing.assert_close(product, expected / states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batch_tokens", [5, 16384])
def test_fisher_product_adds_damping_for_any_micro_batch(make, micro_batch_tokens):
    trainer, experience = make(micro_batch_tokens=micro_batch_tokens, damping=0.5)
    plain, _ = make()
    vector = torch.linspace(-1, 1, len(weights(trainer)), dtype=torch.float64)
    difference = trainer.fisher_product(experience, vector) - plain.fisher_product(
        experience, vector
    )
    torch.testing.assert_close(difference, 0.5 * vector, rtol=1e-9, atol=1e-12)


def test_conjugate_gradients_solve_linear_system(trpo):
    root = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix, target = root @ root.T + torch.eye(6), torch.arange(6, dtype=torch.float64)
    solution = trpo.conjugate_gradients(lambda v: matrix @ v, target, 6)
    torch.testing.assert_close(matrix @ solution, target, rtol=1e-9, atol=1e-9)
    assert trpo.conjugate_gradients(lambda v: matrix @ v, 0 * target, 6).tolist() == [0] * 6


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2])
def test_step_kl_stays_within_and_uses_max_kl(make, max_kl):
    trainer, experience = make(max_kl=max_kl, damping=1e-3)
    old = weights(trainer)
    metrics = trainer.update(experience, Meter())
    new = weights(trainer)
    kl = mean_kl(trainer, old, new).item()
    assert metrics["trpo/kl"] == pytest.approx(kl, rel=1e-6)
    assert 0.1 * max_kl < kl <= max_kl


def test_option_ignored_by_line_search_raises(trpo) -> None:
    with pytest.raises(ValueError, match=r"^num_mini_batches "):
        trpo.TRPOConfig(num_mini_batches=2)


def test_step_without_gain_is_not_taken(make):
    trainer, experience = make()
    old = weights(trainer)
    step = torch.cat([p.flatten() for p in trainer.parameters]).detach() * 0
    assert trainer.line_search(experience, step) == (0.0, 0.0)
    assert trainer.learner.updates_begun == 0
    assert torch.equal(weights(trainer), old)
