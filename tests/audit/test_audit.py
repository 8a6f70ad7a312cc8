"""The audit's numbers against formulas on paper, the enumeration of tests/, and known faults."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rlhf_pg import (
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
)
from rlhf_pg.audit import expectation, world
from rlhf_pg.audit.causes import adapt, audit
from rlhf_pg.audit.expectation import changed, measure
from rlhf_pg.cli import main
from rlhf_pg.cli.recipes import config_of, presets
from rlhf_pg.report.metrics import Meter
from tests import enumeration
from tests.audit import losses
from tests.enumeration import COMPLETIONS, A, B, make_trainer

OPTIONS = {"num_generations": 2, "max_completion_length": 2}
TEACHER = {"teacher_model_name_or_path": "some/model", "beta": 0.3}


@pytest.fixture
def one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "PROMPTS", {"ab": (A, B)})
    monkeypatch.setattr(world, "PRIVILEGED", {"ab": "ab"})


@pytest.mark.parametrize(
    ("args", "scale"),
    [
        (RLOOConfig(beta=0.3, temperature=0.7, num_generations=2), 1),
        (RLOOConfig(beta=0.3, kl_placement="loss", kl_estimator="k1_to_go", num_generations=2), 1),
        (ReinforceConfig(beta=0.3), 1),
        (ReinforceConfig(advantage_estimator="returns_minus_mean", beta=0.0), 1 - 1 / 2),
        (ReinforceConfig(advantage_estimator="returns_minus_greedy"), 1),
        (GRPOConfig(num_generations=5, scale_rewards="none", aggregation="constant"), 1 - 1 / 3),
        (PPOConfig(num_iterations=1, lam=1, normalize_advantages=False, aggregation="constant"), 1),
        (RLOOConfig(num_generations=2, **TEACHER), 1),
        (RLOOConfig(num_generations=2, teacher_divergence="forward_kl", **TEACHER), 1),
        (RLOOConfig(num_generations=2, teacher_divergence="sampled", **TEACHER), 1),
        (
            RLOOConfig(num_generations=2, teacher_placement="reward", teacher_gamma=1.0, **TEACHER),
            1,
        ),
    ],
)
def test_unbiased_config_has_no_bias(args, scale: float) -> None:
    found = measure(args)
    assert found.bias < 1e-8
    assert found.scale == pytest.approx(scale, rel=1e-8)


def enumerated(trainer, later: bool) -> torch.Tensor:
    """-2 E[gradient] over ordered samples; later, at a policy that has moved after them."""
    steps = list(enumeration.outcomes(trainer.model, ["ab"], trainer.args.num_generations))
    batches = []
    for said, _ in steps:
        trainer.sampler.engine.says = said
        batch = trainer.infer(trainer.sampler.next_batch(0, Meter()))
        batches.append(trainer.drop_truncated(trainer.credit(batch, Meter())))
    if later:
        parameters = list(trainer.model.parameters())
        moved = parameters_to_vector(parameters) + 0.03 * enumeration.exact_gradient(trainer)
        vector_to_parameters(moved.detach(), parameters)
    total = 0.0
    for batch, (_, chance) in zip(batches, steps, strict=True):
        trainer.learner.module.zero_grad()
        trainer.learner.accumulate(batch, trainer.objective, Meter())
        total -= 2 * chance * torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return total


MASKED = {"mask_truncated_completions": True, "missing_eos_penalty": 0.5, "entropy_coef": 0.1}


@pytest.mark.usefixtures("one_prompt")
@pytest.mark.parametrize(
    "options", [{**MASKED, "positive_nll_coef": 0.1}, {"num_iterations": 4, "epsilon": 0.1}]
)
def test_measured_is_what_ordered_samples_expect(options, tmp_path: Path) -> None:
    """Of four updates the first is on policy; the others see a policy that has moved."""
    options = {"num_generations": 2, "aggregation": "constant", **options}
    found = measure(GRPOConfig(**options)).gradient
    updates = options.get("num_iterations", 1)
    first, later = (
        enumerated(make_trainer(GRPOTrainer, tmp_path, **options), moved) for moved in (False, True)
    )
    expected = (first + (updates - 1) * later) / updates
    assert (found - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.usefixtures("one_prompt")
def test_causes_explain_the_whole_bias() -> None:
    args = GRPOConfig(**OPTIONS, **TEACHER, teacher_top_k=1, positive_nll_coef=0.1)
    changes = {"rollout_engine": "vllm", "top_p": 0.9, "truncated_sampling": "ignore"}
    args = changed(args, changes | {"top_entropy_quantile": 0.2})
    found = {name: measured for name, measured, _ in audit(args)}
    assert list(found) == [
        *("this config", "rollout_engine: auto, top_p: 1.0, sampler_correction: none"),
        *("advantage_estimator: leave_one_out", "aggregation: constant"),
        *("top_entropy_quantile: 1.0", "positive_nll_coef: 0.0", "teacher_top_k: None"),
        *("kl_estimator: k1_to_go", "scale_rewards: none", "all of these"),
    ]
    assert found["this config"].bias > 0.1
    assert found["all of these"].bias < 1e-8
    assert found["all of these"].scale == pytest.approx(1)


def test_page_has_every_preset_explained() -> None:
    """`python docs/audit.py` has written what docs/correctness.md shows."""
    found = json.loads((Path(__file__).parents[2] / "docs" / "audit.json").read_text())
    assert list(found) == list(presets())
    assert all(one.get("all of these", one["this config"])["bias"] < 1e-8 for one in found.values())
    for name in ("icepop",):
        now = measure(config_of([presets()[name]], [], "audit"))
        assert now.cosine == pytest.approx(found[name]["this config"]["cosine"])


def factor(monkeypatch, said, args, loss, against=None) -> float:
    """How many times the expected gradient of the config's own loss, or of another, it has, where
    the policy says nothing but these; every completion has a micro-batch of its own.
    """
    monkeypatch.setattr(world, "COMPLETIONS", said)
    monkeypatch.setattr(expectation, "MOST", 32)
    size = args.num_generations
    found = measure(args, adapt(loss, size)).gradient
    right = measure(args, against and adapt(against, size)).gradient
    times = found @ right / right.square().sum()
    assert (found - times * right).norm() < 1e-8 * found.norm()
    return times.item()


SURROGATE = {"policy_loss": "surrogate", "num_generations": 4}


@pytest.mark.usefixtures("one_prompt")
@pytest.mark.parametrize(
    ("options", "loss", "times"),
    [
        ({"num_generations": 4}, losses.verl_policy_loss, 1),
        ({"num_generations": 3, "num_iterations": 2}, losses.verl_policy_loss, 1),
        (SURROGATE | {"num_mini_batches": 2}, losses.trl_fixed, 1),
        # "steps_per_generation=4, gradient_accumulation_steps=2: 0.5x" (TRL's pull request 6024)
        (SURROGATE | {"num_mini_batches": 2}, losses.trl_5619, 0.5),
        (SURROGATE, losses.ms_swift_10117, 0.25),
    ],
)
def test_factor_of_a_foreign_loss(options, loss, times: float, monkeypatch) -> None:
    found = factor(monkeypatch, COMPLETIONS[:3], GRPOConfig(**options), loss)
    assert found == pytest.approx(times)


@pytest.mark.usefixtures("one_prompt")
def test_factor_of_vapos_likelihood_in_nemo_rl(monkeypatch) -> None:
    """32 micro-batches of one row, all of one length, as in the measurement that was reported."""
    args = GRPOConfig(num_generations=32)
    faulty = losses.nemo_rl_3791
    found = factor(monkeypatch, [(A, A), (B, A)], args, faulty, losses.nemo_rl_fixed)
    assert found == pytest.approx(32)


@pytest.mark.usefixtures("one_prompt")
def test_command_audits_a_loss_in_a_file(capsys) -> None:
    flags = ["--num_generations", "2", "--scale_rewards", "none", "--micro_batches", "2"]
    main(["audit", "grpo", *flags, "--loss", f"{losses.__file__}:ms_swift_10117"])
    assert "clipped_surrogate: the loss has 0.5 times" in capsys.readouterr().out


def test_loss_with_unknown_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="waves"):
        measure(GRPOConfig(**OPTIONS), adapt(losses.unknown, 1))
