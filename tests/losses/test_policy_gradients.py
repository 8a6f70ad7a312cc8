"""What the gradient of a policy loss is on average, at the old policy and away from it, exactly."""

import pytest
import torch

from rlhf_pg.losses import (
    cispo,
    clipped_surrogate,
    dppo,
    kl_penalty,
    sampler_weights,
    sapo,
    surrogate,
    token_weights,
    vanilla,
)
from tests.advantages import tabular
from tests.advantages.tabular import MASK, SCORES

POLICY, OLD = tabular.logits(0), tabular.logits(1)
OLD_PROBABILITIES = tabular.probabilities(OLD).detach()
NO_CLIP = {"epsilon": 1.0, "epsilon_high": 1e9}
TRUTH = tabular.gradient(tabular.objective(POLICY), POLICY)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def off_by(actual, expected):
    """The error, as a share of what was expected."""
    return ((actual - expected).norm() / expected.norm()).item()


def expected_gradient(loss, sampler=OLD, scores=SCORES, weights=1.0):
    """E[gradient of the summed loss] by the logits of POLICY, over what `sampler` may say."""
    old = tabular.log_probs(sampler).detach()
    per_token, _ = loss(tabular.log_probs(POLICY), old, scores[:, None], MASK)
    chances = tabular.probabilities(sampler).detach()
    return tabular.gradient((chances[:, None] * weights * per_token).sum(), POLICY)


def in_visited_states(number_of_state):
    """Return the mean over completions of OLD, summed over the states of each."""
    return (tabular.visits(OLD).detach() * number_of_state).sum()


def test_tabular_policy_and_action_values_are_consistent():
    assert OLD_PROBABILITIES.sum().item() == pytest.approx(1)
    value = (OLD.softmax(-1)[0] * tabular.action_values(OLD)[0]).sum()
    close(value, tabular.objective(OLD))


ON_POLICY = {
    "vanilla": vanilla,
    "surrogate": surrogate,
    "kl_penalty": kl_penalty,
    "clipped_surrogate": clipped_surrogate,
    "gspo": lambda *x: clipped_surrogate(*x, importance_sampling_level="sequence"),
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
}


@pytest.mark.parametrize("loss", ON_POLICY.values(), ids=ON_POLICY)
@pytest.mark.proves(*(f"rlhf_pg.losses.{name}" for name in ON_POLICY if name != "gspo"))
def test_on_policy_losses_follow_true_gradient(loss):
    close(expected_gradient(loss, sampler=POLICY), -TRUTH)


@pytest.mark.proves("rlhf_pg.losses.vanilla")
def test_off_policy_vanilla_imitates_old_policy():
    likelihood = (OLD_PROBABILITIES * SCORES * tabular.log_probs(POLICY).nansum(1)).sum()
    biased = expected_gradient(vanilla)
    close(biased, -tabular.gradient(likelihood, POLICY))
    assert off_by(biased, -TRUTH) > 0.5


@pytest.mark.proves("rlhf_pg.losses.surrogate", "rlhf_pg.losses.cispo")
@pytest.mark.parametrize("loss", [surrogate, lambda *x: cispo(*x, **NO_CLIP)])
def test_token_ratio_does_not_correct_state_distribution(loss):
    # sum_s d_old(s) sum_a pi(a|s) Q_old(s,a): TRPO's L, not J
    local = in_visited_states((POLICY.softmax(-1) * tabular.action_values(OLD).detach()).sum(1))
    biased = expected_gradient(loss)
    close(biased, -tabular.gradient(local, POLICY))
    assert 0.1 < off_by(biased, -TRUTH) < off_by(expected_gradient(vanilla), -TRUTH)


@pytest.mark.proves("rlhf_pg.losses.kl_penalty")
def test_kl_penalty_is_gradient_of_sequence_kl_old_new():
    nothing = torch.zeros_like(SCORES)
    penalty = expected_gradient(lambda *x: kl_penalty(*x, old_kl_coef=0.7), scores=nothing)
    log_ratio = tabular.log_probs(POLICY).nansum(1) - OLD_PROBABILITIES.log()
    close(penalty, -0.7 * tabular.gradient((OLD_PROBABILITIES * log_ratio).sum(), POLICY))
    assert penalty.norm() > 0.1


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
def test_geometric_mean_at_ratio_one_follows_mean_logprob():
    weights = token_weights(MASK, "sequence_mean", denominator=1, dtype=torch.float64)
    mean_log_prob = tabular.log_probs(POLICY).nanmean(1)
    chances = tabular.probabilities(POLICY).detach()
    expected = -tabular.gradient((chances * SCORES * mean_log_prob).sum(), POLICY)
    close(expected_gradient(ON_POLICY["gspo"], sampler=POLICY, weights=weights), expected)
    assert off_by(expected, -TRUTH) > 0.05  # 1/length has another direction than grad J


# ------------------------------------------------------------------------ a sampler that differs


def corrected(mode, **options):
    """E[gradient of vanilla] where the engine says OLD, and the trainer POLICY."""
    engine, trainer = tabular.log_probs(OLD).detach(), tabular.log_probs(POLICY).detach()
    weights = sampler_weights(trainer, engine, MASK, mode, **options)
    return expected_gradient(vanilla, weights=weights)


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_unbounded_sequence_weights_remove_mismatch(mode):
    close(corrected(mode, clip_max=float("inf")), -TRUTH)


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_token_weights_keep_sampler_state_distribution(mode):
    biased = corrected(mode, clip_max=float("inf"))
    local = in_visited_states((POLICY.softmax(-1) * tabular.action_values(OLD).detach()).sum(1))
    close(biased, -tabular.gradient(local, POLICY))
    assert 0.1 < off_by(biased, -TRUTH) < off_by(expected_gradient(vanilla), -TRUTH)
