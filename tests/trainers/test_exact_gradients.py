"""The expected gradient of every trainer against the exact one, by enumeration in float64.

A loss is minimised and J is maximised; the constant weights divide by N * max_completion_length. So
an unbiased trainer has E[gradient] = -grad J / max_completion_length.
"""

import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_pg import GRPOTrainer, ReinforceTrainer, RLOOTrainer
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    MAX_LENGTH,
    PROMPTS,
    SCORES,
    ascent,
    assert_close,
    exact_gradient,
    expected_gradient,
    log_probs,
    make_trainer,
    score_function_expectation,
)
from tests.models.architectures import build

TWO = ("ab", "bba")


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.cosine_similarity(x, y, dim=0).item()


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (ReinforceTrainer, {"advantage_estimator": "returns", "prompts": TWO}),
        (ReinforceTrainer, {"num_generations": 2, "policy_loss": "clipped_surrogate"}),
        (RLOOTrainer, {"num_generations": 2, "micro_batch_tokens": 5}),
        (GRPOTrainer, {"num_generations": 2, "advantage_estimator": "leave_one_out"}),
        (ReinforceTrainer, {"advantage_estimator": "total_returns"}),
    ],
)
def test_expected_gradient_is_exact(trainer_type, options, tmp_path: Path) -> None:
    def reward(**inputs):
        """All shifted, which changes nothing."""
        return [s + 5.0 for s in enumeration.score(**inputs)]

    trainer = make_trainer(trainer_type, tmp_path, reward=reward, **options)
    assert_close(ascent(trainer), exact_gradient(trainer))


@pytest.mark.parametrize("arch", ["lfm2", "qwen3_5_text"])
def test_expected_gradient_of_recurrent_layers_is_exact(arch, tmp_path: Path) -> None:
    """But for their norms, which compute in float32."""
    policy = build(arch, vocab_size=3, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=EOS)
    trainer = make_trainer(
        RLOOTrainer, tmp_path, num_generations=2, prompts=TWO[:1], inputs={"policy": policy}
    )
    assert trainer.learner.policy.window
    assert_close(ascent(trainer), exact_gradient(trainer), 1e-5)


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (ReinforceTrainer, {"advantage_estimator": "returns"}),
        (RLOOTrainer, {"num_generations": 2}),
    ],
)
def test_expected_gradient_with_kl_reward_is_exact(trainer_type, options, tmp_path: Path) -> None:
    trainer = make_trainer(trainer_type, tmp_path, beta=0.3, **options)
    truth = exact_gradient(trainer, reference=enumeration.model(), beta=0.3)
    assert_close(ascent(trainer), truth)
    assert cosine(truth, exact_gradient(trainer)) < 0.999  # the KL really matters here


def test_mean_baseline_with_own_row_shrinks_gradient(tmp_path) -> None:
    options = {"prompts": TWO, "num_generations": 1, "advantage_estimator": "returns_minus_mean"}
    trainer = make_trainer(ReinforceTrainer, tmp_path, **options)
    assert_close(ascent(trainer), 1 / 2 * exact_gradient(trainer))


def test_unscaled_grpo_shrinks_gradient_by_group_size(tmp_path: Path) -> None:
    trainer = make_trainer(GRPOTrainer, tmp_path, num_generations=2, scale_rewards="none")
    assert_close(ascent(trainer), 1 / 2 * exact_gradient(trainer))


def test_grpo_divides_by_group_std(tmp_path: Path) -> None:
    trainer = make_trainer(GRPOTrainer, tmp_path, num_generations=2)

    def normalized(says):
        scores = [SCORES["ab"][said] for said in says]
        if len(set(scores)) == 1:
            return [0.0, 0.0]
        mean, std = statistics.mean(scores), statistics.stdev(scores)
        return [(s - mean) / (std + 1e-4) / 2 for s in scores]

    expected = score_function_expectation(trainer, normalized)
    assert_close(ascent(trainer), expected)
    assert 0.5 < cosine(expected, exact_gradient(trainer)) < 0.999


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_length_weights_change_gradient_direction(aggregation: str, tmp_path: Path) -> None:
    trainer = make_trainer(RLOOTrainer, tmp_path, num_generations=2, aggregation=aggregation)

    def weighted(says):
        scores = [SCORES["ab"][said] for said in says]
        lengths = [len(said) for said in says]
        weights = {
            "token_mean": [1 / sum(lengths)] * 2,
            "sequence_mean": [1 / (2 * length) for length in lengths],
        }[aggregation]
        return [(scores[i] - scores[1 - i]) * weights[i] for i in range(2)]

    expected = score_function_expectation(trainer, weighted)
    assert_close(-expected_gradient(trainer), expected)
    assert cosine(expected, exact_gradient(trainer)) < 0.999


def test_k3_loss_has_gradient_of_kl_from_reference_to_policy(tmp_path: Path) -> None:
    """On policy, grad of k3 expects sum over visited states of grad KL(ref || pi)."""
    trainer = make_trainer(
        GRPOTrainer, tmp_path, num_generations=2, beta=0.5, reward=lambda prompts, **_: [1.0, 1.0]
    )
    reference, policy = enumeration.model(), trainer.model
    objective = torch.zeros((), dtype=torch.float64)
    for said in COMPLETIONS:
        chance = log_probs(policy, "ab", said).sum().exp().detach()
        ids = torch.tensor([[*PROMPTS["ab"], *said]])
        here = slice(len(PROMPTS["ab"]) - 1, -1)
        log_p = policy(ids).logits[0, here].log_softmax(-1)
        log_ref = reference(ids).logits[0, here].log_softmax(-1).detach()
        objective = objective + chance * (log_ref.exp() * (log_ref - log_p)).sum()
    expected = 0.5 * enumeration.gradient(policy, objective)
    assert_close(MAX_LENGTH * expected_gradient(trainer), expected)
