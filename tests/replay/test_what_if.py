"""What would have changed, against numbers that are known otherwise."""

import math
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.replay.again import Replay
from rlhf_pg.replay.what_if import GRADIENT, UPDATE, WhatIf, what_if
from tests.replay.test_again import contents
from tests.trainers.conftest import digits

RUN = {"max_steps": 3, "save_steps": 2, "optim": "adamw_torch"}


def minus_digits(completions: list[str], **_: Any) -> list[float]:
    return [-score for score in digits(completions)]


def asked(make, kind: type = GRPOTrainer, step: int = 3, **changes: Any) -> WhatIf:
    """Train a run, and ask what would have changed in a step."""
    own = {key: changes.pop(f"own_{key}") for key in list(RUN_KEYS) if f"own_{key}" in changes}
    first = make(kind, **RUN | own)
    first.train()
    replay = Replay(make(kind, **RUN | own))
    before = contents(replay.run.directory)
    found = what_if(replay, make(kind, **RUN | own | changes), step)
    assert contents(replay.run.directory) == before
    return found


RUN_KEYS = ("num_iterations", "num_mini_batches", "beta", "normalize_values", "aggregation")


def test_opposite_reward_turns_the_gradient_around(make) -> None:
    """-R has the advantages -A, so the gradient -g: 180 degrees, of the same length."""
    found = asked(make, reward_funcs=minus_digits)
    assert list(found.changes) == ["reward_funcs"]
    assert found.would_be.advantages.equal(-found.was.advantages)
    assert found.would_be.pull.equal(-found.was.pull)
    assert found.angle(GRADIENT) == pytest.approx(180, abs=1e-2)
    assert found.lengths(GRADIENT)[1] == pytest.approx(found.lengths(GRADIENT)[0], rel=1e-6)
    assert 10 < found.angle(UPDATE) < 180  # Adam remembers what was before
    [was], [now] = found.was.rewards.values(), found.would_be.rewards.values()
    assert [-x for x in was] == now


def test_rate_changes_the_update_and_not_the_gradient(make) -> None:
    found = asked(make, learning_rate=2e-3)
    assert found.angle(GRADIENT) == pytest.approx(0, abs=1e-3)
    assert found.lengths(GRADIENT)[0] == found.lengths(GRADIENT)[1]
    assert found.angle(UPDATE) == pytest.approx(0, abs=0.1)
    assert found.lengths(UPDATE)[1] == pytest.approx(2 * found.lengths(UPDATE)[0], rel=1e-3)
    assert found.would_be.pull.equal(found.was.pull)


def test_pull_of_a_first_update_is_the_advantage(make) -> None:
    """d loss_t / d log pi = -A_t while the ratio is 1, and each of M tokens has the weight 1/M."""
    found = asked(make, learning_rate=2e-3)
    was = found.was
    assert was.pull.allclose(was.advantages.where(found.mask, 0.0), rtol=1e-5)


def test_coefficient_of_the_reference_adds_its_own_gradient(make) -> None:
    """The gradient is linear in beta: g(0.2) - g(0) is twice g(0.1) - g(0)."""
    once, twice = asked(make, beta=0.1), asked(make, beta=0.2)
    name = "model.layers.0.mlp.up_proj.weight"
    base = once.was.gradient[name]
    added = once.would_be.gradient[name] - base
    assert added.abs().max() > 0  # the reference is the model that the run began with
    assert (twice.would_be.gradient[name] - base).allclose(2 * added, rtol=1e-3, atol=1e-7)
    assert once.would_be.metrics["kl"] == pytest.approx(twice.would_be.metrics["kl"])
    assert "kl" not in once.was.metrics


def test_penalty_is_added_to_scores_that_are_there(make) -> None:
    found = asked(make, missing_eos_penalty=0.5)
    assert list(found.would_be.rewards) == ["digits", "missing_eos_penalty"]
    assert found.would_be.rewards["digits"] == found.was.rewards["digits"]
    paid = set(found.would_be.rewards["missing_eos_penalty"])
    assert paid <= {0.0, -0.5}
    assert -0.5 in paid


@pytest.mark.parametrize("more", [{}, {"own_normalize_values": True}])
def test_critic_comes_along(make, more: dict[str, Any]) -> None:
    """Nothing but the policy's epsilon differs, which a first update does not reach."""
    found = asked(make, PPOTrainer, epsilon=0.3, own_num_iterations=1, **more)
    assert any(name.startswith("critic.") for name in found.was.gradient)
    assert found.angle(GRADIENT) == pytest.approx(0, abs=1e-3)
    assert found.would_be.metrics["value_loss"] == found.was.metrics["value_loss"]


def test_clipped_tokens_lose_their_pull_in_a_later_pass(make) -> None:
    """A range of almost nothing holds all updates after the first back."""
    found = asked(make, own_num_iterations=3, epsilon=1e-6)
    assert found.angle(GRADIENT) == pytest.approx(0, abs=1e-3)
    was, now = found.lengths(UPDATE)
    assert now != pytest.approx(was, rel=1e-3)
    assert found.was.metrics["clip_ratio/region_mean"] < 0.2
    assert found.would_be.metrics["clip_ratio/region_mean"] > 0.3


def test_reinforce_and_another_estimator(make) -> None:
    found = asked(make, ReinforceTrainer, advantage_estimator="returns")
    assert found.would_be.advantages.ne(found.was.advantages)[found.mask].any()
    assert not math.isnan(found.angle(GRADIENT))


def test_angle_of_what_does_not_move_is_unknown(make) -> None:
    found = asked(make, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    assert found.lengths(GRADIENT)[1] == 0
    assert math.isnan(found.angle(GRADIENT))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.5}, "temperature cannot be changed for completions that are there"),
        ({"num_generations": 2}, "num_generations cannot be changed"),
        ({}, "no key differs from the run's"),
    ],
)
def test_what_would_be_another_run_is_refused(make, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(make, **change)


def test_greedy_completions_cannot_be_made_up(make) -> None:
    with pytest.raises(ValueError, match="needs greedy completions, which the run did not sample"):
        asked(make, ReinforceTrainer, advantage_estimator="returns_minus_greedy")


def test_run_goes_on_as_if_nothing_was_asked(make) -> None:
    """The weights of the run itself are those after the step."""
    first = make(**RUN)
    first.train()
    trained = {key: value.clone() for key, value in first.model.state_dict().items()}
    replay = Replay(make(**RUN))
    what_if(replay, make(**RUN, reward_funcs=minus_digits), 3)
    now = replay.trainer.model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in trained.items())


def greedy(make, **changes: Any) -> WhatIf:
    options = RUN | {"advantage_estimator": "returns_minus_greedy", "beta": 0.0}
    make(ReinforceTrainer, **options).train()
    other = make(ReinforceTrainer, **options | changes)
    return what_if(Replay(make(ReinforceTrainer, **options)), other, 3)


def test_greedy_baseline_gets_the_other_rewards_too(make) -> None:
    found = greedy(make, reward_funcs=minus_digits)
    assert found.would_be.advantages.allclose(-found.was.advantages)


def test_greedy_baseline_has_the_penalties_too(make) -> None:
    """Of a completion's penalty, that of the greedy one is subtracted: each is 0 or 0.5."""
    found = greedy(make, missing_eos_penalty=0.5)
    cut = torch.tensor(found.would_be.rewards["missing_eos_penalty"]) < 0
    added = (found.would_be.advantages - found.was.advantages)[:, 0]
    assert cut.any()
    assert set(added[cut].mul(2).round(decimals=4).tolist()) <= {-1.0, 0.0}
    assert set(added[~cut].mul(2).round(decimals=4).tolist()) <= {0.0, 1.0}


def test_other_size_of_a_penalty(make) -> None:
    make(**RUN, missing_eos_penalty=0.5).train()
    replay = Replay(make(**RUN, missing_eos_penalty=0.5))
    found = what_if(replay, make(**RUN, missing_eos_penalty=1.0), 3)
    assert set(found.was.rewards["missing_eos_penalty"]) <= {0.0, -0.5}
    assert min(found.would_be.rewards["missing_eos_penalty"]) == -1.0


def test_step_is_taken_afterwards(make) -> None:
    """The next one can be made, and the same question has the same answer."""
    options = RUN | {"max_steps": 4}
    make(**options).train()
    replay = Replay(make(**options))
    once = what_if(replay, make(**options, beta=0.1), 3)
    assert replay.make(4).differs == []
    again = what_if(replay, make(**options, beta=0.1), 3)
    assert all(again.was.gradient[name].equal(g) for name, g in once.was.gradient.items())
    assert replay.make(3).differs == []
    assert not replay.trainer.records_all


def test_updates_that_would_be_skipped_are_not_kept(make) -> None:
    asked(make, reward_weights=[1e38], scale_rewards="none")


def test_rows_are_batched_as_the_model_check_finds_right(make, monkeypatch) -> None:
    make(**RUN).train()
    replay, other = Replay(make(**RUN)), make(**RUN, beta=0.1)
    checked = []
    monkeypatch.setattr(other, "keep_to_model", lambda: checked.append(True))
    what_if(replay, other, 3)
    assert checked
