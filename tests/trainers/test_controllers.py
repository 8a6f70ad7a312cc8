"""Coefficients that move, the forms of the KL and the sampler's correction, through a trainer."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_pg import Callback, GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.report.run_files import read
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    MAX_LENGTH,
    expected_gradient,
    gradient,
    gradient_of,
    log_probs,
    make_trainer,
    probabilities,
)

MOVING = {
    "beta": 0.1,
    "kl_controller": "adaptive",
    "kl_target": 0.01,
    "kl_horizon": 100,
    "entropy_target": 1.5,
    "entropy_coef": 0.01,
    "kl_adaptive_lr": 1e-9,
    "lr_scheduler_type": "constant",
    "num_iterations": 2,
}
OLD_KL = {"policy_loss": "kl_penalty", "old_kl_target": 1e-4, "old_kl_coef": 0.5}


def lines(tmp_path: Path) -> list[dict]:
    return read(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("trainer_type", "where", "options"),
    [
        (GRPOTrainer, "loss", {"kl_estimator": "k3", **OLD_KL}),
        (ReinforceTrainer, "reward", {"kl_estimator": "k1", "policy_loss": "clipped_surrogate"}),
    ],
)
def test_coefficients_follow_what_a_step_measured(
    make, trainer_type, where, options, tmp_path
) -> None:
    make(trainer_type, kl_placement=where, **MOVING, **options).train()
    beta, old_kl_coef = 0.1, 0.5
    for line in lines(tmp_path):
        kl = line["kl/completion"]
        if where == "reward":  # the mean over tokens is known too
            assert kl == pytest.approx(line["kl"] * line["completions/mean_length"], rel=1e-5)
        beta *= 1 + min(max(kl / 0.01 - 1, -0.2), 0.2) * 16 / 100
        assert line["beta"] == pytest.approx(beta, rel=1e-6)
        assert line["entropy"] > 1.5  # a random model
        kl = line["approx_kl/after"]
        old_kl_coef *= 0.5 if kl < 1e-4 / 1.5 else 2 if kl > 1e-4 * 1.5 else 1
        if options["policy_loss"] == "kl_penalty":
            assert line["old_kl_coef"] == old_kl_coef
    assert beta != 0.1
    assert old_kl_coef != 0.5
    entropy_coefs = [line["entropy_coef"] for line in lines(tmp_path)]
    assert entropy_coefs == pytest.approx([0.005, 0.0, 0.0])
    # Every KL is far above 1e-9: each step divides the rate by 1.5.
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    assert rates == pytest.approx([1e-3, 1e-3 / 1.5, 1e-3 / 1.5**2])


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k2"), ("reward", "k1")])
def test_moved_beta_sets_gradient(where, estimator, tmp_path) -> None:
    """Moved from 0.1 to 0.4, it gives the gradient of 0.4."""
    options = {"num_generations": 2, "kl_placement": where, "kl_estimator": estimator}
    options["advantage_estimator"] = "leave_one_out"
    says = [(1, 0), (2, 2)]
    moved = make_trainer(GRPOTrainer, tmp_path, beta=0.1, kl_controller="penalty", **options)
    moved.controllers.controllers["beta"].coef = 0.4
    fixed = make_trainer(GRPOTrainer, tmp_path, beta=0.4, **options)
    torch.testing.assert_close(gradient_of(moved, says), gradient_of(fixed, says))
    other = make_trainer(GRPOTrainer, tmp_path, beta=0.1, **options)
    assert not torch.allclose(gradient_of(moved, says), gradient_of(other, says))


ONCE = {"num_iterations": 1}
UPDATES = [
    (GRPOTrainer, {"num_iterations": 3}),
    (ReinforceTrainer, ONCE | {"advantage_estimator": "returns"}),
    (PPOTrainer, {"num_iterations": 2, "policy_loss": "kl_penalty", "old_kl_target": 0.1}),
]


@pytest.mark.proves("rlhf_pg.kl.KLAdaptiveRate")
@pytest.mark.parametrize(("trainer_type", "options"), UPDATES)
def test_kl_after_updates_matches_exact_kl(trainer_type, options, tmp_path) -> None:
    """The batch has every completion as often as it is likely, so that its mean is the KL."""
    if "old_kl_target" not in options:
        options = {"kl_adaptive_lr": 1.0} | options
    trainer = make_trainer(
        trainer_type, tmp_path / "run", num_generations=9, learning_rate=0.03, **options
    )
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.zero_()  # each of the three tokens: 1/3
    old = probabilities(trainer.model, "ab")
    trainer.sampler.engine.says = [*[COMPLETIONS[0]] * 3, *COMPLETIONS[1:]]
    trainer.train()
    new = probabilities(trainer.model, "ab")
    kl = sum(p * (p / new[said]).log() for said, p in old.items())
    assert kl > 1e-3
    (line,) = lines(tmp_path)
    assert line["completions/mean_length"] == pytest.approx(15 / 9)
    assert line["approx_kl/after"] * 15 / 9 == pytest.approx(kl.item(), rel=1e-9)


def test_kl_of_single_update_is_that_of_first_sample(tmp_path) -> None:
    """Nothing follows it, so of this one prompt's nine completions every 16th is seen."""
    trainer = make_trainer(GRPOTrainer, tmp_path / "run", num_generations=9, learning_rate=0.03)
    old = probabilities(trainer.model, "ab")[COMPLETIONS[0]]
    trainer.sampler.engine.says = COMPLETIONS[:1] * 3 + COMPLETIONS[1:]
    trainer.train()
    ratio = probabilities(trainer.model, "ab")[COMPLETIONS[0]] / old
    kl = (ratio - 1 - ratio.log()).item()
    assert kl > 1e-5
    assert lines(tmp_path)[0]["approx_kl/after"] == pytest.approx(kl, rel=1e-9)


def test_kl_against_log_probabilities_with_dropout_is_not_reported(tmp_path) -> None:
    """A single update computes them with dropout, which is no change of the policy."""
    dropout = {
        "num_generations": len(COMPLETIONS),
        "use_peft": True,
        "lora_dropout": 0.3,
        "disable_dropout": False,
    }
    for iterations in (1, 2):
        path = tmp_path / str(iterations)
        trainer = make_trainer(GRPOTrainer, path / "run", num_iterations=iterations, **dropout)
        trainer.sampler.engine.says = COMPLETIONS
        trainer.train()
        (line,) = lines(path)
        assert (line["approx_kl/after"] is None) == (iterations == 1)


def test_entropy_coef_raised_from_zero_changes_gradient(tmp_path) -> None:
    options = {"num_generations": 2, "entropy_target": 9.0}
    trainer = make_trainer(GRPOTrainer, tmp_path, **options)
    plain = make_trainer(GRPOTrainer, tmp_path, num_generations=2)
    says = [(1, 0), (2, 2)]
    # Another order of operations: equal but for the last bits.
    gradients = gradient_of(trainer, says), gradient_of(plain, says)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)
    trainer.controllers.controllers["entropy_coef"].coef = 0.1
    assert not torch.allclose(gradient_of(trainer, says), gradient_of(plain, says))


def test_kl_adaptive_lr_with_own_scheduler_is_refused(make) -> None:
    model = make().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="kl_adaptive_lr"):
        make(model=model, optimizers=(optimizer, schedule), kl_adaptive_lr=0.1)


def sequence_kl(trainer) -> torch.Tensor:
    """grad KL(pi || ref) over whole completions, summed over everything that can be said."""
    reference = enumeration.model()
    total = torch.zeros((), dtype=torch.float64)
    for said in COMPLETIONS:
        log_p = log_probs(trainer.model, "ab", said).sum()
        with torch.no_grad():
            log_ref = log_probs(reference, "ab", said).sum()
        total = total + log_p.exp() * (log_p - log_ref)
    return gradient(trainer.model, total)


def kl_gradient(tmp_path, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """E[gradient of the KL in the loss] in the units of grad KL, and grad KL itself."""
    options = {
        "num_generations": 1,
        "kl_placement": "loss",
        "kl_estimator": estimator,
        "beta": 1.0,
        "reward": lambda completion_ids, **_: [0.0] * len(completion_ids),
        "advantage_estimator": "returns",
    }
    trainer = make_trainer(ReinforceTrainer, tmp_path, **options)
    return MAX_LENGTH * expected_gradient(trainer), sequence_kl(trainer)


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
def test_k1_to_go_loss_has_exact_kl_gradient(tmp_path) -> None:
    actual, truth = kl_gradient(tmp_path, "k1_to_go")
    assert (actual - truth).norm() <= 1e-8 * truth.norm()


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
@pytest.mark.parametrize("estimator", ["k2", "k2_straight_through", "k3_ratio"])
def test_token_level_kl_losses_agree_but_are_biased(estimator, tmp_path) -> None:
    """They agree with one another, and point nearly where the true gradient does."""
    actual, truth = kl_gradient(tmp_path, estimator)
    per_state, _ = kl_gradient(tmp_path, "k2")
    assert (actual - per_state).norm() <= 1e-8 * per_state.norm()
    assert 0.9 < torch.cosine_similarity(actual, truth, dim=0) < 1 - 1e-6


def under_another_sampler(tmp_path, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """E over what another model samples of the gradient, and grad J of the policy itself."""
    trainer = make_trainer(
        ReinforceTrainer, tmp_path, num_generations=1, advantage_estimator="returns", **options
    )
    sampler = enumeration.model(seed=3)
    with torch.no_grad():
        table = {said: log_probs(sampler, "ab", said).tolist() for said in COMPLETIONS}
    trainer.sampler.engine = enumeration.OtherSampler(table)
    total = sum(math.exp(sum(table[said])) * gradient_of(trainer, [said]) for said in COMPLETIONS)
    return -MAX_LENGTH * total, enumeration.exact_gradient(trainer)


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
def test_untruncated_sequence_weights_make_gradient_unbiased(tmp_path) -> None:
    options = {"sampler_correction": "sequence_truncate", "sampler_clip_max": 1e6}
    actual, truth = under_another_sampler(tmp_path, **options)
    assert (actual - truth).norm() <= 1e-8 * truth.norm()
    uncorrected, _ = under_another_sampler(tmp_path)
    assert (uncorrected - truth).norm() > 0.01 * truth.norm()


def test_ppo_sampler_correction_leaves_value_loss_unchanged(tmp_path) -> None:
    """The value loss of a token that the sampler would not have said is as it was."""
    options = {"beta": 0.0, "num_iterations": 1, "normalize_advantages": False}
    corrected = make_trainer(
        PPOTrainer, tmp_path, **options, sampler_correction="token_mask", sampler_clip_max=0.5
    )
    plain = make_trainer(PPOTrainer, tmp_path, **options)
    # The listed engine says log p = 0, so a weight is p(y): likely tokens are above 0.5.
    said = max(probabilities(plain.model, "ab").items(), key=lambda pair: pair[1])[0]
    size = sum(p.numel() for p in plain.learner.policy.parameters())
    masked, full = gradient_of(corrected, [said]), gradient_of(plain, [said])
    assert torch.equal(masked[size:], full[size:])
    assert not torch.equal(masked[:size], full[:size])


LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8.0}
KINDS = {"full": {}, "lora": LORA}


def named(module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_moves_by_mixup_alpha_at_sync_steps(make, kind) -> None:
    seen = []

    class Keep(Callback):
        def on_step(self, trainer, metrics) -> None:
            models = trainer.learner.policy, trainer.learner.reference.policy
            seen.append([named(model) for model in models])

    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3}
    options = {"beta": 0.1, "max_steps": 4, "learning_rate": 1e-2, "dtype": "float64"}
    trainer = make(callbacks=[Keep()], **options, **sync, **KINDS[kind])
    expected = named(trainer.learner.policy)
    trainer.train()
    for step, (policy, reference) in enumerate(seen, start=1):
        if step in (2, 4):
            moved = {n: 0.3 * p + 0.7 * expected[n] for n, p in policy.items()}
            assert max((moved[n] - expected[n]).abs().max() for n in moved) > 1e-4
            expected = moved
        assert reference.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(reference[name], tensor, rtol=1e-12, atol=1e-15)
