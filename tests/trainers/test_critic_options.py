"""The critic's options: its targets, its units, its head start, and the estimators that ask it."""

import json
import math
import shutil
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from rlhf_pg import Callback, PPOConfig, PPOTrainer
from rlhf_pg.models import new_critic
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.trainers.optimizer import group_of
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    MAX_LENGTH,
    A,
    B,
    exact_gradient,
    expected_gradient,
    gradient_of,
)
from tests.tiny import adapter
from tests.trainers.test_ppo import (
    GOLDEN,
    TWO,
    assert_close,
    experience_of,
    fitted,
    of_the_policy,
    ppo,
    true_values,
)
from tests.untimed import untimed

GAE = {"advantage_estimator": "gae", "lam": 0.5}
STEPS_OF_TWO = {"advantage_estimator": "n_step", "n_steps": 2, "lam": 0.95}
VPG = {"advantage_estimator": "returns_minus_values", "lam": 0.95}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8.0}
CRITICS = {"separate": {}, "shared": {"critic": "shared"}, "lora": LORA}


def ascent(trainer: PPOTrainer) -> Tensor:
    """What the trainer expects of the policy's gradient of J."""
    return -MAX_LENGTH * of_the_policy(trainer, expected_gradient(trainer))


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("options", "advantages", "returns"),
    [
        # V = .5, .6, .7 and 1 paid at the end: delta = .1, .1, .3
        (GAE, [0.225, 0.25, 0.3], [0.725, 0.85, 1.0]),
        (GAE | {"value_lam": 1.0}, [0.225, 0.25, 0.3], [1.0, 1.0, 1.0]),
        (GAE | {"value_lam": 0.0}, [0.225, 0.25, 0.3], [0.6, 0.7, 1.0]),
        (STEPS_OF_TWO, [0.2, 0.4, 0.3], [0.7, 1.0, 1.0]),
        (STEPS_OF_TWO | {"value_lam": 0.0}, [0.2, 0.4, 0.3], [0.6, 0.7, 1.0]),
        (VPG, [0.5, 0.4, 0.3], [1.0, 1.0, 1.0]),
        (VPG | {"gamma": 0.5}, [-0.25, -0.1, 0.3], [0.25, 0.5, 1.0]),
        # V = .8 after the end: 1 + .5 * .8, and half of that, and half of that
        (
            GAE | {"lam": 0.0, "gamma": 0.5, "value_lam": 1.0, "bootstrap_truncated": True},
            [-0.2, -0.25, 0.7],
            [0.35, 0.7, 1.4],
        ),
    ],
)
@pytest.mark.proves("rlhf_pg.trainers.PPOTrainer.returns")
def test_advantages_and_returns_by_hand(tmp_path, options, advantages, returns) -> None:
    trainer = ppo(
        tmp_path,
        GOLDEN,
        prompts=("a",),
        reward=lambda prompts, **_: [1.0],
        max_completion_length=3,
        **options,
    )
    experience = experience_of(trainer, [(A, A, A)])
    assert experience.advantages[0].tolist() == pytest.approx(advantages)
    assert experience.returns[0].tolist() == pytest.approx(returns)


@pytest.mark.parametrize(
    "options", [GAE | {"value_lam": 1.0}, VPG, STEPS_OF_TWO, STEPS_OF_TWO | {"n_steps": 1}]
)
def test_critic_fitted_to_targets_converges_to_true_values(tmp_path, options) -> None:
    """By the expected gradient of the value loss, while the policy stays."""
    truth = true_values(("ab",))
    start = dict.fromkeys(truth, 0.0)
    trainer = ppo(tmp_path, start, vf_coef=2.0, cliprange_value=None, **options)
    assert fitted(trainer)[:-1].tolist() == pytest.approx(list(truth.values()))


# ------------------------------------------------------------------ estimators with a critic


@pytest.mark.parametrize("options", [VPG, STEPS_OF_TWO | {"n_steps": None}])
def test_full_return_gradient_is_exact_with_any_critic(tmp_path, options) -> None:
    trainer = ppo(tmp_path, prompts=TWO, **options)
    assert_close(ascent(trainer), exact_gradient(trainer))


@pytest.mark.parametrize("options", [VPG, STEPS_OF_TWO | {"n_steps": 1}])
def test_true_values_make_gradient_exact(tmp_path, options) -> None:
    trainer = ppo(tmp_path, true_values(TWO), prompts=TWO, **options)
    assert_close(ascent(trainer), exact_gradient(trainer))


def test_one_step_a2c_bias_equals_critic_error(tmp_path) -> None:
    """V off by d after the first token moves its advantage by d: by hand, on the exact gradient."""
    values, off = true_values(("ab",)), 0.7
    values[(A, B, A)] += off
    trainer = ppo(tmp_path, values, **STEPS_OF_TWO | {"n_steps": 1})
    first = enumeration.log_probs(trainer.model, "ab", (A, EOS))[0]
    # The second token's advantage is off by -d whatever it is: no bias.
    bias = off * enumeration.gradient(trainer.model, first.exp())
    assert bias.norm() > 1e-2
    assert_close(ascent(trainer) - exact_gradient(trainer), bias)


@pytest.mark.parametrize("options", [GAE, VPG, STEPS_OF_TWO | {"n_steps": 1}])
def test_true_values_make_expected_advantages_zero(tmp_path, options) -> None:
    trainer = ppo(tmp_path, true_values(("ab",)), num_generations=len(COMPLETIONS), **options)
    advantages = experience_of(trainer, COMPLETIONS).advantages
    chances = enumeration.probabilities(trainer.model, "ab")
    weighted = torch.stack([chances[said] for said in COMPLETIONS])[:, None] * advantages
    for said in [(), (A,), (B,)]:
        rows = [i for i, full in enumerate(COMPLETIONS) if full[: len(said)] == said]
        assert weighted[rows, len(said)].abs().max() > 1e-3
        assert weighted[rows, len(said)].sum().item() == pytest.approx(0, abs=1e-12)


# -------------------------------------------------------------------------- values in units


def set_moments(trainer: PPOTrainer, mean: float, var: float) -> None:
    vars(trainer.value_moments).update(count=1e6, mean=mean, var=var)


@pytest.mark.parametrize("options", [GAE, STEPS_OF_TWO | {"n_steps": 1}, GAE | {"value_lam": 0.3}])
def test_normalized_critic_gives_same_advantages(tmp_path, options) -> None:
    """A plain critic with the head (3 w, 3 b + 0.7) says what a normalised one means."""
    options = options | {"prompts": TWO, "num_generations": 2, "bootstrap_truncated": True}
    plain, scaled = ppo(tmp_path, **options), ppo(tmp_path, normalize_values=True, **options)
    set_moments(scaled, 0.7, 9.0)
    with torch.no_grad():
        plain.critic.head.weight *= 3
        plain.critic.head.bias.mul_(3).add_(0.7)
    says = [COMPLETIONS[i] for i in (2, 3, 6, 1)]  # ended and cut off
    expected, actual = experience_of(plain, says), experience_of(scaled, says)
    torch.testing.assert_close(actual.advantages, expected.advantages, rtol=1e-12, atol=1e-12)
    assert expected.advantages.abs().max() > 0.1
    moments = scaled.value_moments
    targets = (expected.returns - moments.mean) / math.sqrt(moments.var)
    mask = expected.action_mask
    torch.testing.assert_close(actual.returns[mask], targets[mask], rtol=1e-12, atol=1e-12)
    assert not actual.returns[~mask].any()


def test_normalized_critic_gives_same_explained_variance(tmp_path) -> None:
    options = {"prompts": TWO, "lam": 1.0}
    plain, scaled = ppo(tmp_path, **options), ppo(tmp_path, normalize_values=True, **options)
    set_moments(scaled, 0.7, 9.0)
    with torch.no_grad():
        plain.critic.head.weight *= 3
        plain.critic.head.bias.mul_(3).add_(0.7)
    numbers = []
    for trainer in (plain, scaled):
        trainer.sampler.engine.says = [(A, B), (B, EOS)]
        samples = trainer.sampler.roll_out(range(2))
        _, metrics = trainer.estimate(
            trainer.learner.score(trainer.sampler.scored(samples)), Meter()
        )
        numbers.append(metrics["explained_variance"])
    assert numbers[0] == pytest.approx(numbers[1])
    assert abs(numbers[0]) > 0.01


def test_value_targets_are_normalized_by_running_moments(tmp_path) -> None:
    trainer = ppo(tmp_path, normalize_values=True, prompts=("a",), num_generations=2)
    first = experience_of(trainer, [(EOS,), (A, EOS)])
    # returns .3 | 1 1: mean 2.3 / 3, variance .98 / 9
    mean, std = 2.3 / 3, math.sqrt(0.98) / 3
    assert vars(trainer.value_moments) == pytest.approx({"count": 3, "mean": mean, "var": std**2})
    expected = [[(0.3 - mean) / std, 0.0], [(1 - mean) / std] * 2]
    assert first.returns.tolist() == [pytest.approx(row) for row in expected]

    second = experience_of(trainer, [(A, A), (B, EOS)])
    # -.7 -.7 | 2 2 as well: mean 4.9 / 7, variance (.16 + 2 * .09 + 2 * 1.96 + 2 * 1.69) / 7
    std = math.sqrt(7.64 / 7)
    moments = {"count": 7, "mean": 0.7, "var": 7.64 / 7}
    assert vars(trainer.value_moments) == pytest.approx(moments)
    expected = [[-1.4 / std] * 2, [1.3 / std] * 2]
    assert second.returns.tolist() == [pytest.approx(row) for row in expected]


def test_value_clip_of_unmoved_critic_leaves_gradient_unchanged(tmp_path) -> None:
    """Before the first update it has not moved, however far the moments have: nothing is cut."""
    options = {"normalize_values": True, "num_generations": 2, "vf_coef": 1.0}
    clipped, free = (ppo(tmp_path, cliprange_value=c, **options) for c in (0.01, None))
    says = [(A, B), (B, EOS)]
    assert_close(gradient_of(clipped, says), gradient_of(free, says))
    batch = experience_of(clipped, says)
    raw, _ = clipped.critic(batch)
    assert batch.values.equal(raw.detach())


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_normalized_critic_starts_at_zero(make, critic) -> None:
    trainer = make(PPOTrainer, critic=critic, normalize_values=True, lam=1.0)
    samples = trainer.sampler.roll_out(range(4))
    experience, metrics = trainer.estimate(
        trainer.learner.score(trainer.sampler.scored(samples)), Meter()
    )
    assert not experience.values.any()
    assert metrics["explained_variance"] == 0
    targets = experience.returns[experience.action_mask]
    assert targets.mean().item() == pytest.approx(0, abs=1e-6)
    assert targets.var(correction=0).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_saved_critic_gives_denormalized_values(make, options, tmp_path) -> None:
    trainer = make(
        PPOTrainer, normalize_values=True, learning_rate=1e-2, num_generations=1, **options
    )
    trainer.train()
    samples = trainer.sampler.roll_out(range(4))
    path = str(tmp_path / "run" / "final" / "critic")
    saved = new_critic(trainer.model, trainer.processing_class, torch.float32, value_model=path)
    with torch.no_grad():
        raw, end = trainer.critic(samples)
        values, saved_end = saved.eval()(samples)
    moments, mask = trainer.value_moments, samples.action_mask
    assert (raw - values)[mask].abs().max() > 0.05
    close = {"rtol": 1e-5, "atol": 1e-5}
    std = math.sqrt(moments.var)
    torch.testing.assert_close(values[mask], raw[mask] * std + moments.mean, **close)
    torch.testing.assert_close(saved_end, end * std + moments.mean, **close)


# ------------------------------------------------------------------------- the critic first


class Keep(Callback):
    """Policy and critic after every step."""

    def __init__(self) -> None:
        self.policies: list[list[Tensor]] = []
        self.heads: list[Tensor] = []

    def on_step(self, trainer, metrics) -> None:
        self.policies.append(copies(trainer.model))
        self.heads.append(trainer.critic.head.weight.detach().clone())


@pytest.mark.parametrize("critic", CRITICS)
def test_value_pretraining_leaves_policy_unchanged(make, critic) -> None:
    keep = Keep()
    options = {"value_pretraining_steps": 2, "weight_decay": 0.1, "entropy_coef": 0.1}
    trainer = make(PPOTrainer, max_steps=3, callbacks=[keep], **options, **CRITICS[critic])
    start, head = copies(trainer.model), trainer.critic.head.weight.clone()
    trainer.train()
    stays = [same(start, now) for now in keep.policies]
    assert stays == [True, True, False]
    heads = [head, *keep.heads]
    assert not any(a.equal(b) for a, b in pairwise(heads))


@pytest.mark.parametrize("critic", CRITICS)
def test_value_iterations_leave_policy_unchanged(make, critic, tmp_path) -> None:
    """The policy takes the step that it takes without them, whatever there was of momentum."""
    ends, counts = [], []
    for further in (0, 3):
        options = {"num_iterations": 2, "num_mini_batches": 2, **CRITICS[critic]}
        trainer = make(PPOTrainer, max_steps=1, value_iterations=further, **options)
        head = trainer.critic.head.weight
        trainer.train()
        policy = next(p for p in trainer.model.parameters() if p.requires_grad)
        updates = trainer.learner.optimizer.state
        counts.append([int(updates[p]["step"]) for p in (policy, head)])
        ends.append((copies(trainer.model), head.detach().clone()))
        assert read(tmp_path / "run" / "metrics.jsonl")[0]["num_updates"] == 4
        shutil.rmtree(tmp_path / "run")
    assert counts == [[4, 4], [4, 10]]
    assert same(ends[0][0], ends[1][0])
    assert not ends[0][1].equal(ends[1][1])


def test_value_iterations_reduce_value_error(make) -> None:
    """By the value loss on the same rollout, which the policy has no part in."""
    errors = []
    for further in (0, 10):
        trainer = make(PPOTrainer, value_iterations=further, cliprange_value=None, num_iterations=1)
        samples = trainer.sampler.roll_out(range(4))
        experience, _ = trainer.estimate(
            trainer.learner.score(trainer.sampler.scored(samples)), Meter()
        )
        trainer.learner.update(experience, 0, Meter())
        values = trainer.learner.score(experience).values
        mask = experience.action_mask
        errors.append(float((values - experience.returns)[mask].square().mean()))
    assert errors[1] < 0.9 * errors[0]


def test_value_pretraining_excludes_policy_from_norm_and_adam(make) -> None:
    trainer = make(PPOTrainer, value_pretraining_steps=1, max_grad_norm=1e-3, num_iterations=2)
    learner, policy = trainer.learner, list(trainer.model.parameters())
    samples = trainer.sampler.roll_out(range(4))
    experience, _ = trainer.estimate(
        trainer.learner.score(trainer.sampler.scored(samples)), Meter()
    )
    learner.accumulate(experience, Meter())
    grads = [p.grad.double() for p in trainer.critic.parameters()]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
    assert any(p.grad.any() for p in policy)
    learner.optimizer.zero_grad()
    # Of the two updates the first is the one with the critic as it is now.
    norms, apply_gradient = [], learner.trained.step
    learner.trained.step = lambda: norms.append(apply_gradient()) or norms[-1]
    learner.update(experience, 0, Meter())
    assert norms[0] == pytest.approx(norm)
    assert not any(p in learner.optimizer.state for p in policy)
    learner.update(experience, 1, Meter())
    assert {int(learner.optimizer.state[p]["step"]) for p in policy} == {2}


def test_policy_and_critic_have_own_schedules(make, tmp_path) -> None:
    options = {"value_pretraining_steps": 2, "warmup_steps": 2}
    make(PPOTrainer, max_steps=6, value_learning_rate=2e-3, **options).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    # The policy's four steps of linear decay begin at the third; the critic has all six.
    rates = [0, 0, 0, 0.5e-3, 1e-3, 0.5e-3]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    values = [0, 1e-3, 2e-3, 1.5e-3, 1e-3, 0.5e-3]
    assert [line["value_learning_rate"] for line in lines] == pytest.approx(values)


def test_critic_schedule_defaults_to_policy_schedule(make, tmp_path) -> None:
    make(PPOTrainer, max_steps=4, warmup_steps=2, lr_scheduler_type="cosine").train()
    for line in read(tmp_path / "run" / "metrics.jsonl"):
        assert line["value_learning_rate"] == line["learning_rate"]


def test_group_of_finds_param_group_of_module() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    one.weight.requires_grad_(False)
    groups = [{"params": two.parameters(), "lr": 0.2}, {"params": [one.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    assert [group_of(one, optimizer)["lr"], group_of(two, optimizer)["lr"]] == [0.1, 0.2]


def test_controllers_do_not_move_during_value_pretraining(make, tmp_path) -> None:
    """Its KL is 0 while it stays, which would make beta fall and the learning rate rise."""
    options = {"kl_controller": "adaptive", "kl_horizon": 16, "kl_adaptive_lr": 1e-4}
    make(PPOTrainer, max_steps=3, value_pretraining_steps=2, **options).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    betas = [line["beta"] for line in lines]
    assert betas[:2] == [0.05, 0.05]
    assert betas[2] < 0.05
    assert [line["learning_rate_scale"] for line in lines[:2]] == [1.0, 1.0]


def test_target_kl_does_not_stop_value_pretraining(make, tmp_path) -> None:
    """Dropout makes a policy seem to drift that stays."""
    options = LORA | {"lora_dropout": 0.3, "disable_dropout": False, "target_kl": 1e-9}
    options |= {"num_iterations": 4, "learning_rate": 0.1}
    make(PPOTrainer, value_pretraining_steps=1, max_steps=3, **options).train()
    updates = [line["num_updates"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert updates[0] == 4
    assert updates[2] < 4


@pytest.mark.parametrize("stop", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "critic", [pytest.param("separate", marks=pytest.mark.slow), "shared", "lora"]
)
def test_run_resumed_around_value_pretraining_is_bit_identical(
    make, critic, stop, tmp_path
) -> None:
    def build(name: str) -> PPOTrainer:
        return make(PPOTrainer, output_dir=str(tmp_path / name), **options, **CRITICS[critic])

    options = {"value_pretraining_steps": 2, "warmup_steps": 1}
    options |= {"normalize_values": True, "value_lam": 1.0, "kl_controller": "adaptive"}
    options |= {"max_steps": 4, "save_steps": stop}
    whole, part = build("whole"), build("part")
    whole.train()
    part.total_steps = stop
    part.train()
    torch.manual_seed(999)
    rest = build("part")
    rest.train(resume_from_checkpoint="latest")
    assert same(copies(rest.learner.module), copies(whole.learner.module))
    assert rest.running == whole.running
    assert untimed(tmp_path / "part") == untimed(tmp_path / "whole")


def test_checkpoint_holds_value_moments_and_trained_critic(make, tmp_path) -> None:
    trainer = make(PPOTrainer, normalize_values=True, save_steps=3)
    trainer.train()
    state = json.loads((trainer.checkpointer.path() / "state.json").read_text())
    assert state["running"]["value_moments"] == vars(trainer.value_moments)
    assert state["running"]["value_moments"]["count"] > 3 * 16
    fresh = make(PPOTrainer, normalize_values=True, output_dir=str(tmp_path / "fresh"))
    fresh.checkpointer.restore(trainer.checkpointer.path(), rank=0)
    assert same(copies(fresh.critic), copies(trainer.critic))


def test_critic_from_checkpoint_gives_denormalized_values(make, tmp_path) -> None:
    trainer = make(PPOTrainer, normalize_values=True, save_steps=3)
    trainer.train()
    moments, rollout = trainer.value_moments, trainer.sampler.roll_out(range(4))
    checkpoint = trainer.checkpointer.path() / "critic"
    later = make(PPOTrainer, value_model=str(checkpoint), output_dir=str(tmp_path / "later"))
    plain = torch.where(rollout.action_mask, moments.denormalize(trainer.critic(rollout)[0]), 0.0)
    torch.testing.assert_close(later.critic(rollout)[0], plain)
    assert abs(moments.mean) > 0.01


# ------------------------------------------------------------------------------ random weights


def test_random_critic_shares_only_policy_architecture(make) -> None:
    options = {"value_init": "random", "normalize_advantages": False}
    trainer, again = make(PPOTrainer, **options), make(PPOTrainer, **options)
    other, plain = make(PPOTrainer, seed=7, **options), make(PPOTrainer)
    trunk = dict(trainer.model.base_model.named_parameters())
    own = dict(trainer.critic.model.named_parameters())
    assert {n: p.shape for n, p in own.items()} == {n: p.shape for n, p in trunk.items()}
    matrices = [name for name, p in own.items() if p.ndim == 2]
    assert not any(own[name].equal(trunk[name]) for name in matrices)
    assert all(own[name].std() > 1e-3 for name in matrices)
    assert same(copies(again.critic), copies(trainer.critic))
    assert not same(copies(other.critic), copies(trainer.critic))
    assert same(copies(trainer.model), copies(plain.model))
    samples = trainer.sampler.roll_out(range(4))
    assert samples.token_lists() == plain.sampler.roll_out(range(4)).token_lists()
    assert not any(numbers.any() for numbers in trainer.critic(samples))
    trainer.train()
    assert all(not own[name].equal(p) for name, p in again.critic.model.named_parameters())


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("given", ["optimizer", "schedule"])
def test_value_schedule_option_with_own_optimizer_is_refused(make, given) -> None:
    value_model = nn.Embedding(20, 1)
    trained = make(PPOTrainer, value_model=value_model)
    optimizer = torch.optim.SGD(trained.learner.module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizers = (optimizer, schedule if given == "schedule" else None)
    inputs = {"model": trained.model, "value_model": value_model, "optimizers": optimizers}
    inputs["processing_class"] = trained.processing_class
    make(PPOTrainer, **inputs)
    with pytest.raises(ValueError, match="value_pretraining_steps"):
        make(PPOTrainer, **inputs, value_pretraining_steps=1)


def test_run_of_only_value_pretraining_trains_only_critic(make) -> None:
    trainer = make(PPOTrainer, max_steps=2, value_pretraining_steps=3)
    start = copies(trainer.model)
    trainer.train()
    assert same(start, copies(trainer.model))
    assert trainer.critic.head.weight.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vf_coef": 0.0, "value_lam": 1.0}, "value_lam has no effect without vf_coef"),
        ({"vf_coef": 0.0, "normalize_values": True}, "normalize_values has no effect without vf"),
        ({"vf_coef": 0.0, "value_pretraining_steps": 1}, "value_pretraining_steps has no eff"),
        ({"vf_coef": 0.0, "value_iterations": 1}, "value_iterations has no effect without vf"),
        (
            {"value_init": "random", "value_model_name_or_path": "judge"},
            "value_model_name_or_path has no effect without value_init",
        ),
    ],
)
def test_contradictory_critic_options_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**options)


def test_random_value_init_for_value_model_or_adapter_is_refused(make) -> None:
    value_model = nn.Embedding(20, 1)
    with pytest.raises(ValueError, match="value_init random takes the policy's architecture"):
        make(PPOTrainer, value_init="random", value_model=value_model)
    with pytest.raises(ValueError, match="value_init random cannot be used with an adapter"):
        make(PPOTrainer, value_init="random", peft_config=adapter())


def test_normalize_values_with_nonzero_head_is_refused(make, tmp_path) -> None:
    make(PPOTrainer, num_generations=1).train()
    trained = str(tmp_path / "run" / "final" / "critic")
    for value_model in (nn.Embedding(20, 1), trained):
        with pytest.raises(ValueError, match="normalize_values needs a critic"):
            make(PPOTrainer, normalize_values=True, value_model=value_model)
