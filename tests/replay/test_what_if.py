"""What another config would have made of the completions of a step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.replay.replay import Replay
from rlhf_pg.replay.what_if import WhatIf, what_if
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.replay.test_replay import contents
from tests.trainers.conftest import digits, maker

RUN = {"max_steps": 3, "save_steps": 2}


def minus_digits(completions: list[str], **_: Any) -> list[float]:
    return [-score for score in digits(completions)]


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory) -> Callable[..., PolicyGradientTrainer]:
    """A maker of trainers beside a run that is there: asking leaves it as it was."""
    make = maker(model_path, tmp_path_factory.mktemp("trained"))
    make(GRPOTrainer, **RUN).train()
    return make


def asked(make, kind: type = GRPOTrainer, own: dict[str, Any] | None = None, **changes) -> WhatIf:
    """Train a run of its own options, if it has any; ask what would have changed in step 3."""
    options = RUN | (own or {})
    if own is not None:
        make(kind, **options).train()
    replay = Replay(make(kind, **options))
    before = contents(replay.run.directory)
    found = what_if(replay, make(kind, **options | changes), 3)
    assert contents(replay.run.directory) == before
    return found


def test_opposite_reward_turns_the_gradient_around(trained) -> None:
    """-R has the advantages -A, so the gradient -g: 180 degrees, of the same length."""
    found = asked(trained, reward_funcs=minus_digits)
    assert list(found.changes) == ["reward_funcs"]
    assert found.would_be.advantages.equal(-found.was.advantages)
    assert found.angle() == pytest.approx(180, abs=1e-2)
    assert found.lengths()[1] == pytest.approx(found.lengths()[0], rel=1e-6)
    [was], [now] = found.was.rewards.values(), found.would_be.rewards.values()
    assert [-x for x in was] == now


def test_coefficient_of_the_reference_adds_its_own_gradient(trained) -> None:
    """The gradient is linear in beta: g(0.2) - g(0) is twice g(0.1) - g(0)."""
    once, twice = asked(trained, beta=0.1), asked(trained, beta=0.2)
    name = "model.layers.0.mlp.up_proj.weight"
    base = once.was.gradient[name]
    added = once.would_be.gradient[name] - base
    assert added.abs().max() > 0  # the reference is the model that the run began with
    assert (twice.would_be.gradient[name] - base).allclose(2 * added, rtol=1e-3, atol=1e-7)
    assert once.would_be.metrics["kl"] == pytest.approx(twice.would_be.metrics["kl"])


def test_penalty_is_added_to_scores_that_are_there(make) -> None:
    """A penalty of the run's own is not counted twice."""
    found = asked(make, own={"missing_eos_penalty": 0.25}, missing_eos_penalty=0.5)
    assert found.would_be.rewards["digits"] == found.was.rewards["digits"]
    assert set(found.would_be.rewards["missing_eos_penalty"]) == {0.0, -0.5}
    assert set(found.was.rewards["missing_eos_penalty"]) == {0.0, -0.25}


def test_angle_of_what_does_not_move_is_unknown(trained) -> None:
    found = asked(trained, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    assert found.lengths()[1] == 0
    assert math.isnan(found.angle())


@pytest.mark.parametrize("key", ["temperature", "num_generations", ""])
def test_what_would_be_another_run_is_refused(trained, key: str) -> None:
    changes = {key: 2.0 if key == "temperature" else 2} if key else {}
    with pytest.raises(ValueError, match=key or "no key differs"):
        asked(trained, **changes)


def test_values_in_other_units_are_another_run(make) -> None:
    with pytest.raises(ValueError, match="normalize_values"):
        asked(make, PPOTrainer, {"normalize_values": True}, normalize_values=False)


def test_greedy_baseline_gets_the_other_rewards_too(make) -> None:
    own = {"advantage_estimator": "returns_minus_greedy", "beta": 0.0}
    found = asked(make, ReinforceTrainer, own, reward_funcs=minus_digits)
    assert found.would_be.advantages.allclose(-found.was.advantages)
    plain = RUN | {"advantage_estimator": "returns"}
    make(ReinforceTrainer, **plain).train()
    with pytest.raises(ValueError, match="greedy"):
        what_if(Replay(make(ReinforceTrainer, **plain)), make(ReinforceTrainer, **RUN | own), 3)


def test_frozen_policy_has_no_gradient(make) -> None:
    found = asked(make, PPOTrainer, {"value_pretraining_steps": 3}, vf_coef=0.3)
    for side in (found.was, found.would_be):
        moved = {name for name, gradient in side.gradient.items() if gradient.any()}
        assert moved
        assert all(name.startswith("critic.") for name in moved)
    assert found.lengths()[1] == pytest.approx(3 * found.lengths()[0], rel=1e-4)


def test_run_goes_on_as_if_nothing_was_asked(make) -> None:
    """Running statistics, weights and the critic's are those before the step, which can be made.
    Nothing but the policy's epsilon differs, which a first update does not reach.
    """
    options = RUN | {"normalize_values": True, "kl_controller": "adaptive"}
    make(PPOTrainer, **options).train()
    replay = Replay(make(PPOTrainer, **options))
    once = what_if(replay, make(PPOTrainer, **options, epsilon=0.3), 3)
    assert any(name.startswith("critic.") for name in once.was.gradient)
    assert once.angle() == pytest.approx(0, abs=1e-3)
    assert once.would_be.metrics["value_loss"] == once.was.metrics["value_loss"]
    again = what_if(replay, make(PPOTrainer, **options, epsilon=0.3), 3)
    assert all(torch.equal(again.was.gradient[n], g) for n, g in once.was.gradient.items())
    assert replay.make(3).differs == []
