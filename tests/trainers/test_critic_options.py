"""The critic's options: its targets, its units, its head start, and the estimators that ask it."""

import math
import shutil
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from rlhf_pg import Callback, PPOTrainer
from rlhf_pg.models.critic import new_critic
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    A,
    B,
    ascent,
    assert_close,
    exact_gradient,
    gradient_of,
)
from tests.tiny import adapter
from tests.trainers.conftest import estimated
from tests.trainers.test_ppo import (
    GOLDEN,
    TWO,
    experience_of,
    ppo,
)

GAE = {"advantage_estimator": "gae", "lam": 0.5}
STEPS_OF_TWO = {"advantage_estimator": "n_step", "n_steps": 2, "lam": 0.95}
VPG = {"advantage_estimator": "returns_minus_values", "lam": 0.95}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8.0}
CRITICS = {"shared": {"critic": "shared"}, "lora": LORA}


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


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


@pytest.mark.parametrize("options", [VPG, STEPS_OF_TWO | {"n_steps": None}])
def test_full_return_gradient_is_exact_with_any_critic(tmp_path, options) -> None:
    trainer = ppo(tmp_path, **options)
    assert_close(ascent(trainer), exact_gradient(trainer))


def plain_and_normalized(tmp_path, **options) -> tuple[PPOTrainer, PPOTrainer]:
    """A plain critic with the head (3 w, 3 b + 0.7) says what the normalised one means."""
    options["prompts"] = TWO
    plain, scaled = ppo(tmp_path, **options), ppo(tmp_path, normalize_values=True, **options)
    vars(scaled.value_moments).update(count=1e6, mean=0.7, var=9.0)
    with torch.no_grad():
        plain.critic.head.weight *= 3
        plain.critic.head.bias.mul_(3).add_(0.7)
    return plain, scaled


@pytest.mark.parametrize("options", [GAE, STEPS_OF_TWO | {"n_steps": 1}, GAE | {"value_lam": 0.3}])
def test_normalized_critic_gives_same_advantages(tmp_path, options) -> None:
    options = options | {"num_generations": 2, "bootstrap_truncated": True}
    plain, scaled = plain_and_normalized(tmp_path, **options)
    says = [COMPLETIONS[i] for i in (2, 3, 6, 1)]  # ended and cut off
    (expected, metrics), (actual, own) = (estimated(one, says) for one in (plain, scaled))
    assert own["explained_variance"] == pytest.approx(metrics["explained_variance"])
    assert abs(metrics["explained_variance"]) > 0.01
    torch.testing.assert_close(actual.advantages, expected.advantages, rtol=1e-12, atol=1e-12)
    assert expected.advantages.abs().max() > 0.1
    moments = scaled.value_moments
    targets = (expected.returns - moments.mean) / math.sqrt(moments.var)
    mask = expected.action_mask
    torch.testing.assert_close(actual.returns[mask], targets[mask], rtol=1e-12, atol=1e-12)
    assert not actual.returns[~mask].any()


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


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_saved_critic_gives_denormalized_values(make, options, tmp_path) -> None:
    more = {"normalize_values": True, "learning_rate": 1e-2, "max_steps": 2, "save_steps": 2}
    trainer = make(PPOTrainer, **more, **options)
    trainer.train()
    samples = trainer.sampler.roll_out(range(4))
    with torch.no_grad():
        raw, end = trainer.critic(samples)
    moments, mask = trainer.value_moments, samples.action_mask
    close = {"rtol": 1e-5, "atol": 1e-5}
    std = math.sqrt(moments.var)
    for directory in (tmp_path / "run" / "final", trainer.checkpointer.path()):
        path = str(directory / "critic")
        saved = new_critic(trainer.model, trainer.processing_class, torch.float32, value_model=path)
        with torch.no_grad():
            values, saved_end = saved.eval()(samples)
        assert (raw - values)[mask].abs().max() > 0.05
        torch.testing.assert_close(values[mask], raw[mask] * std + moments.mean, **close)
        torch.testing.assert_close(saved_end, end * std + moments.mean, **close)


class Keep(Callback):
    """Policy and critic after every step."""

    def __init__(self) -> None:
        self.policies: list[list[Tensor]] = []
        self.heads: list[Tensor] = []

    def on_step(self, trainer, metrics) -> None:
        self.policies.append(copies(trainer.model))
        self.heads.append(trainer.critic.head.weight.detach().clone())


@pytest.mark.parametrize("critic", ["shared", "lora"])
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


@pytest.mark.parametrize("critic", ["shared", "lora"])
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


def test_value_pretraining_excludes_policy_from_norm_and_adam(make) -> None:
    trainer = make(PPOTrainer, value_pretraining_steps=1, max_grad_norm=1e-3, num_iterations=2)
    learner, policy = trainer.learner, list(trainer.model.parameters())
    experience, _ = estimated(trainer)
    learner.accumulate(experience, trainer.objective, Meter())
    grads = [p.grad.double() for p in trainer.critic.parameters()]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
    assert any(p.grad.any() for p in policy)
    learner.optimizer.zero_grad()
    # Of the two updates the first is the one with the critic as it is now.
    norms, apply_gradient = [], learner.backend.step
    learner.backend.step = lambda: norms.append(apply_gradient()) or norms[-1]
    learner.update(experience, trainer.objective, Meter())
    assert norms[0] == pytest.approx(norm)
    assert not any(p in learner.optimizer.state for p in policy)
    trainer.state.step = 1
    learner.update(experience, trainer.objective, Meter())
    assert {int(learner.optimizer.state[p]["step"]) for p in policy} == {2}


def test_policy_and_critic_have_own_schedules(make, tmp_path) -> None:
    options = {"value_pretraining_steps": 2, "warmup_steps": 2}
    sizes = {"prompts_per_step": 1, "num_generations": 1, "num_iterations": 2}
    make(PPOTrainer, max_steps=6, value_learning_rate=2e-3, **options, **sizes).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    # The policy's four steps of linear decay begin at the third; the critic has all six.
    rates = [0, 0, 0, 0.5e-3, 1e-3, 0.5e-3]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    values = [0, 1e-3, 2e-3, 1.5e-3, 1e-3, 0.5e-3]
    assert [line["value_learning_rate"] for line in lines] == pytest.approx(values)


def test_policy_that_stays_moves_no_controller_and_stops_no_update(make, tmp_path) -> None:
    """Its KL is 0, which would make beta fall and the learning rate rise; dropout makes it seem
    to drift.
    """
    options = LORA | {"lora_dropout": 0.3, "disable_dropout": False, "target_kl": 1e-9}
    options |= {"kl_controller": "adaptive", "kl_horizon": 16, "kl_adaptive_lr": 1e-4}
    options |= {"num_iterations": 4, "learning_rate": 0.1}
    make(PPOTrainer, max_steps=3, value_pretraining_steps=1, **options).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert (lines[0]["beta"], lines[0]["learning_rate_scale"]) == (0.05, 1.0)
    assert lines[2]["beta"] != 0.05
    assert lines[0]["num_updates"] == 4
    assert lines[2]["num_updates"] < 4


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


def test_value_schedule_option_with_own_optimizer_is_refused(make) -> None:
    value_model = nn.Embedding(20, 1)
    trained = make(PPOTrainer, value_model=value_model)
    optimizer = torch.optim.SGD(trained.learner.module.parameters(), lr=0.1)
    inputs = {"model": trained.model, "value_model": value_model, "optimizers": (optimizer, None)}
    inputs["processing_class"] = trained.processing_class
    make(PPOTrainer, **inputs)
    with pytest.raises(ValueError, match="value_pretraining_steps"):
        make(PPOTrainer, **inputs, value_pretraining_steps=1)


def test_run_of_only_value_pretraining_trains_only_critic(make) -> None:
    trainer = make(PPOTrainer, max_steps=1, value_pretraining_steps=2)
    start = copies(trainer.model)
    trainer.train()
    assert same(start, copies(trainer.model))
    assert trainer.critic.head.weight.any()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"value_init": "random", "value_model": nn.Embedding(20, 1)}, "value_init"),
        ({"value_init": "random", "peft_config": adapter()}, "value_init"),
        ({"normalize_values": True, "value_model": nn.Embedding(20, 1)}, "normalize_values"),
    ],
)
def test_unfit_critic_is_refused(make, options, key) -> None:
    with pytest.raises(ValueError, match=key):
        make(PPOTrainer, **options)


def test_normalize_values_with_a_trained_head_is_refused(make, tmp_path) -> None:
    make(PPOTrainer, num_generations=1, max_steps=1).train()
    trained = str(tmp_path / "run" / "final" / "critic")
    with pytest.raises(ValueError, match="normalize_values"):
        make(PPOTrainer, normalize_values=True, value_model=trained)
