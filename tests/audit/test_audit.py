"""The audit's numbers against formulas on paper, the enumeration of tests/, and known faults."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_pg import (
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from rlhf_pg.audit import expectation, world
from rlhf_pg.audit.causes import adapt, audit
from rlhf_pg.audit.expectation import changed, measure
from rlhf_pg.cli import main
from rlhf_pg.cli.recipes import config_of, presets
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import SamplingParams
from tests import enumeration
from tests.audit import losses
from tests.enumeration import PROMPTS, make_trainer

OPTIONS = {"num_generations": 2, "max_completion_length": 2}


@pytest.mark.parametrize(
    ("args", "scale"),
    [
        (RLOOConfig(beta=0.3, num_generations=2), 1),
        (RLOOConfig(beta=0.3, temperature=0.7, num_generations=2), 1),
        (RLOOConfig(beta=0.3, kl_placement="loss", kl_estimator="k1_to_go"), 1),
        (ReinforceConfig(beta=0.3), 1),
        (ReinforceConfig(advantage_estimator="returns_minus_mean", beta=0.0), 1 - 1 / 3),
        (ReinforceConfig(advantage_estimator="returns_minus_greedy"), 1),
        (GRPOConfig(num_generations=5, scale_rewards="none", aggregation="constant"), 1 - 1 / 5),
        (PPOConfig(num_iterations=1, lam=1, normalize_advantages=False, aggregation="constant"), 1),
    ],
)
def test_unbiased_config_has_no_bias(args, scale: float) -> None:
    found = measure(args)
    assert found.bias < 1e-8
    assert found.scale == pytest.approx(scale, rel=1e-8)


def enumerated(trainer, later: bool) -> tuple[torch.Tensor, float]:
    """E[gradient] and E[its square] by whole steps of the trainer, the models' passes included."""
    (prompts, n) = trainer.train_prompts.rows["prompt"], trainer.args.num_generations
    steps = list(enumeration.outcomes(trainer.model, prompts, n))
    batches = []
    for said, _ in steps:
        trainer.sampler.engine.says = said
        batch = trainer.learner.score(trainer.sampler.next_batch(0, Meter()))
        batches.append(trainer.drop_truncated(trainer.estimate(batch, Meter())[0]))
    if later:
        expectation.move(trainer.model, SamplingParams(max_tokens=2))
    total, square = 0.0, 0.0
    for batch, (_, chance) in zip(batches, steps, strict=True):
        trainer.learner.module.zero_grad()
        trainer.learner.accumulate(batch, Meter())
        own = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        total, square = total + chance * own, square + chance * float(own.square().sum())
    return total, square


MASKED = {"mask_truncated_completions": True, "missing_eos_penalty": 0.5, "entropy_coef": 0.1}


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (GRPOTrainer, {"num_generations": 2, "aggregation": "token_mean", "beta": 0.3, **MASKED}),
        (RLOOTrainer, {"num_generations": 2, "aggregation": "sequence_mean", "beta": 0.3}),
        (GRPOTrainer, {"num_generations": 2, "positive_nll_coef": 0.1, "scale_rewards": "none"}),
        (PPOTrainer, {"num_iterations": 1, "normalize_advantages": False, "lam": 0.5}),
        (ReinforceTrainer, {"advantage_estimator": "returns", "normalize_advantages": True}),
    ],
)
def test_measured_is_what_whole_steps_expect(trainer_type, options, tmp_path: Path) -> None:
    """Steps of one prompt, of each in turn, or of all three where statistics cross groups."""
    prompts = [tuple(PROMPTS)] if trainer_type is ReinforceTrainer else [(one,) for one in PROMPTS]
    trainers = [make_trainer(trainer_type, tmp_path, among, **options) for among in prompts]
    expected, square = map(sum, zip(*(enumerated(one, False) for one in trainers), strict=True))
    found = measure(trainers[0].args)
    mean = expected / len(trainers)
    tables = [enumeration.probabilities(trainers[0].model, prompt) for prompt in PROMPTS]
    length = sum(float(p) * len(said) for one in tables for said, p in one.items()) / 3
    if trainers[0].args.aggregation == "constant":
        length = 2
    assert (found.gradient + length * mean).norm() < 1e-9 * found.gradient.norm()
    norm = float(mean.square().sum())
    assert found.variance == pytest.approx((square / len(trainers) - norm) / norm)
    assert found.cosine < 0.999


def test_later_updates_are_what_whole_steps_expect(tmp_path: Path, monkeypatch) -> None:
    """Of four updates the first is on policy; the others see a policy that has moved by 0.01."""
    monkeypatch.setattr(world, "PROMPTS", {"ab": PROMPTS["ab"]})
    options = {"num_generations": 2, "num_iterations": 4, "epsilon": 0.1}
    first, later = (
        enumerated(make_trainer(RLOOTrainer, tmp_path, **options), moved)[0]
        for moved in (False, True)
    )
    found = measure(RLOOTrainer.config_type(**options, beta=0.0))
    assert (found.gradient + 2 * (first + 3 * later) / 4).norm() < 1e-9 * found.gradient.norm()
    one = make_trainer(RLOOTrainer, tmp_path, **options).model
    before = world.all_log_probs(one).detach()
    expectation.move(one, world.PLAIN)
    chances, tokens = before.sum(1).exp(), torch.tensor([1, 2, 2, 2, 2, 2, 2])
    moved = (
        chances @ (before - world.all_log_probs(one).detach()).sum(1) / (chances @ tokens.double())
    )
    assert float(moved) == pytest.approx(0.01, rel=1e-6)


def test_k3_follows_other_kl() -> None:
    """Sum over visited states of grad KL(ref || pi), not of grad KL(pi || ref)."""
    args = GRPOConfig(beta=0.3, scale_rewards="none", aggregation="constant", num_generations=2)
    found = measure(args).gradient - measure(changed(args, {"beta": 0.0})).gradient
    policy, reference = make_trainer(RLOOTrainer, "unused", num_generations=2).model, world.model()
    objective = torch.zeros((), dtype=torch.float64)
    for prompt, ids in PROMPTS.items():
        for said in world.COMPLETIONS:
            chance = world.log_probs(policy, prompt, said).sum().exp().detach() / 3
            row = torch.tensor([[*ids, *said]])
            log_p, log_ref = (
                one(row).logits[0, len(ids) - 1 : -1].log_softmax(-1) for one in (policy, reference)
            )
            objective = objective + chance * (log_ref.exp() * (log_ref - log_p)).sum()
    expected = -0.3 * world.gradient(policy, objective)
    assert (found - expected).norm() < 1e-8 * expected.norm()


def test_causes_explain_the_whole_bias() -> None:
    args = GRPOConfig(**OPTIONS, beta=0.3, missing_eos_penalty=1.0, temperature=0.9)
    args = changed(args, {"rollout_engine": "vllm", "top_p": 0.9, "truncated_sampling": "ignore"})
    found = {name: measured for name, measured, _ in audit(args)}
    assert [name.removeprefix("without ") for name in found] == [
        *("this config", "own score in mean", "scale_rewards", "aggregation", "KL form"),
        *("truncation", "sampler", "all"),
    ]
    assert found["this config"].bias > 0.1
    assert found["without all"].bias < 1e-8
    assert found["without all"].scale == pytest.approx(1)


def test_page_has_every_preset_explained() -> None:
    """`python docs/audit.py` has written what docs/correctness.md shows."""
    found = json.loads((Path(__file__).parents[2] / "docs" / "audit.json").read_text())
    assert found.keys() <= presets().keys()
    assert all(one.get("without all", one["this config"])["bias"] < 1e-8 for one in found.values())
    for name in ("rloo", "deepseekmath", "gspo"):
        now = measure(config_of([presets()[name]], [], "audit"))
        assert now.cosine == pytest.approx(found[name]["this config"]["cosine"])


# -------------------------------------------------------------------- losses of other libraries


def factor(args, loss, micro_batches: int, against=None) -> float:
    """How many times the expected gradient of the config's own loss, or of another, it has."""
    found = measure(args, adapt(loss, micro_batches)).gradient
    right = measure(args, against and adapt(against, micro_batches)).gradient
    times = found @ right / right.square().sum()
    assert (found - times * right).norm() < 1e-8 * found.norm()
    return times.item()


SURROGATE = {"policy_loss": "surrogate", "num_generations": 4}


@pytest.mark.parametrize(
    ("options", "loss", "micro_batches", "times"),
    [
        ({"num_generations": 4}, losses.verl_policy_loss, 2, 1),
        ({"num_generations": 3, "num_iterations": 2}, losses.verl_policy_loss, 1, 1),
        (SURROGATE | {"num_mini_batches": 2}, losses.trl_fixed, 2, 1),
        # "steps_per_generation=4, gradient_accumulation_steps=2: 0.5x" (TRL's pull request 6024)
        (SURROGATE | {"num_mini_batches": 2}, losses.trl_5619, 2, 0.5),
        (SURROGATE, losses.ms_swift_10117, 4, 0.25),
    ],
)
def test_factor_of_a_foreign_loss(options, loss, micro_batches: int, times: float) -> None:
    assert factor(GRPOConfig(**options), loss, micro_batches) == pytest.approx(times)


def test_factor_of_vapos_likelihood_in_nemo_rl(monkeypatch) -> None:
    """32 micro-batches of one row, all of one length, as in the measurement that was reported."""
    monkeypatch.setattr(world, "PROMPTS", {"ab": PROMPTS["ab"]})
    args = GRPOConfig(num_generations=32, max_completion_length=1)
    times = factor(args, losses.nemo_rl_3791, 32, losses.nemo_rl_fixed)
    assert times == pytest.approx(32)


@pytest.mark.parametrize("key", ["loss", "policy_loss"])
def test_command_audits_a_loss_in_a_file(key: str, capsys) -> None:
    flags = ["--num_generations", "4", "--max_completion_length", "1", "--scale_rewards", "none"]
    main(["audit", "grpo", *flags, f"--{key}", f"{losses.__file__}:ms_swift_10117"])
    shown = capsys.readouterr().out
    assert "with clipped_surrogate" in shown
    assert "0.25 times" in " ".join(shown.split())
    main(["audit", "grpo", *flags, f"--{key}", f"{losses.__file__}:ours"])
    assert "with clipped_surrogate" not in capsys.readouterr().out


def test_loss_with_unknown_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="waves"):
        measure(GRPOConfig(**OPTIONS), adapt(losses.unknown, 1))
