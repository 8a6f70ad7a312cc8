"""The expected gradient of every named estimator, by enumeration: the true one, or its known bias.

An estimator's gradient is the mean over rows of sum_t A_t grad log p_t.
"""

import dataclasses
import statistics

import pytest
import torch

from rlhf_pg.advantages import ADVANTAGES, optimal_baseline
from tests.advantages import tabular_inputs as tabular
from tests.advantages.tabular import MASK
from tests.advantages.tabular_inputs import (
    PAID,
    REWARDS,
    STATES,
    VALUES,
    expected_gradient,
    true_gradient,
)

GROUP = (0, 0, 0)  # one prompt, answered three times
MIXED = (0, 0, 1)  # two prompts; the second has one answer, and one reward source less


def equal(actual, expected):
    assert expected.norm() > 1e-2
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def cosine(x, y):
    return torch.cosine_similarity(x, y, dim=0).item()


def estimated(name, prompts=GROUP, values=VALUES, steps=False, **options):
    """E[gradient] of a named estimator."""

    def advantages(said):
        s = tabular.signals(prompts, said, values)
        if steps:
            scores = tabular.STEPS[list(prompts), list(said)]
            s = dataclasses.replace(s, step_scores=scores, step_mask=s.mask)
        return ADVANTAGES[name](s, **options)

    return expected_gradient(prompts, advantages)


# ------------------------------------------------------------------- what each of them expects


def truth():
    return true_gradient(GROUP)


def discounted(gamma=0.5):
    """E[sum_t grad log p_t (r_t + gamma r_{t+1})]."""
    to_go = REWARDS.clone()
    to_go[..., 0] += gamma * REWARDS[..., 1]
    weights = tabular.chances()[..., None] * to_go
    weights[1] = 0  # the other prompt
    return tabular.weighted(weights)


def of_the_discounted_return(gamma=0.5):
    """grad E[r_1 + gamma r_2] of the first prompt."""
    paid = REWARDS[0, :, 0] + gamma * REWARDS[0, :, 1]
    return tabular.gradient((tabular.log_probs()[0].sum(1).exp() * paid).sum())


def with_the_critics_error(lam):
    """grad J + (1 - lam) E[grad log p(y_1) (V(y_1) - E[r_2 | y_1])], where there is a y_2."""
    error = (VALUES - tabular.exact_values())[:, STATES[:, 1]]
    weights = torch.zeros(2, 7, 2, dtype=torch.float64)
    weights[0, :, 0] = (1 - lam) * (tabular.chances() * error * MASK[:, 1])[0]
    return truth() + tabular.weighted(weights)


def normalized(said):
    scores = [PAID[0, c].item() for c in said]
    if len(set(scores)) == 1:
        return [0.0] * 3
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    return [(score - mean) / (std + 1e-4) for score in scores]


def normalized_sources(said):
    """Before the division by the batch's deviation, which is that of its three rows here."""
    total = [0.0] * 3
    for source in tabular.SCORES[0].unbind(1):
        scores = [source[c].item() for c in said]
        mean, std = statistics.mean(scores), statistics.stdev(scores)
        total = [a + (s - mean) / (std + 1e-4) for a, s in zip(total, scores, strict=True)]
    return [a / (statistics.stdev(total) + 1e-4) for a in total]


def normalized_steps(said):
    scores = [[tabular.STEPS[0, c, t].item() for t in range(2) if MASK[c, t]] for c in said]
    each = [score for row in scores for score in row]
    if len(set(each)) == 1:
        return torch.zeros(3, 2)
    mean, std = statistics.mean(each), statistics.stdev(each)
    steps = [[(score - mean) / (std + 1e-4) for score in row] for row in scores]
    return [[sum(row), sum(row[1:])] for row in steps]


# name: (options, what its gradient expects)
EXPECTED = {
    "leave_one_out": [({}, truth)],
    "returns": [({}, truth), ({"gamma": 0.5}, discounted)],
    "returns_minus_others": [({}, truth), ({"gamma": 0.5}, discounted)],
    "returns_minus_moving_average": [({}, truth), ({"gamma": 0.5}, discounted)],
    "returns_minus_greedy": [({}, truth), ({"gamma": 0.5}, discounted)],
    "returns_minus_optimal": [({}, truth), ({"gamma": 0.5}, discounted)],
    "returns_minus_values": [({}, truth), ({"gamma": 0.5}, discounted)],
    "total_returns": [({}, truth), ({"gamma": 0.5}, of_the_discounted_return)],
    # a third of the mean is the row's own score
    "returns_minus_mean": [
        ({}, lambda: 2 / 3 * truth()),
        ({"gamma": 0.5}, lambda: discounted() - truth() / 3),
    ],
    "group_normalized": [
        ({"scale_rewards": "none"}, lambda: 2 / 3 * truth()),
        ({}, lambda: expected_gradient(GROUP, normalized)),
    ],
    "group_normalized_per_source": [({}, lambda: expected_gradient(GROUP, normalized_sources))],
    "process_group_normalized": [
        ({}, lambda: expected_gradient(GROUP, normalized)),  # one step per completion
        ({"steps": True}, lambda: expected_gradient(GROUP, normalized_steps)),
    ],
    "gae": [
        ({"lam": 1.0}, truth),
        ({"lam": 1.0, "gamma": 0.5}, discounted),
        ({"lam": 0.8}, lambda: with_the_critics_error(0.8)),
        # two tokens: 1 - 1 / (0.8 * 2) = 3/8
        ({"lam_alpha": 0.8}, lambda: with_the_critics_error(0.375)),
        # 1 - 1 / (0.4 * 2) < 0
        ({"lam_alpha": 0.4}, lambda: with_the_critics_error(0.0)),
    ],
    "n_step": [
        ({"n_steps": None}, truth),
        ({"n_steps": None, "gamma": 0.5}, discounted),
        ({"n_steps": 2}, truth),
        ({}, lambda: with_the_critics_error(0.0)),
    ],
}
CASES = [
    pytest.param(
        name,
        options,
        formula,
        marks=pytest.mark.proves(f"rlhf_pg.advantages.estimators.{ADVANTAGES[name].__name__}"),
        id="-".join([name, *map(str, options.values())]),
    )
    for name, cases in EXPECTED.items()
    for options, formula in cases
]


def test_every_estimator_has_expected_gradient_case():
    assert EXPECTED.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize(("name", "options", "formula"), CASES)
def test_estimator_expected_gradient(name, options, formula):
    equal(estimated(name, **options), formula())


@pytest.mark.parametrize(
    "name",
    [
        "returns",
        "returns_minus_others",
        "returns_minus_moving_average",
        "returns_minus_greedy",
        "returns_minus_optimal",  # baseline 0 for the single answer: its own score would give 2/3
        "returns_minus_values",
    ],
)
def test_gradient_is_unbiased_over_unequal_prompts(name):
    equal(estimated(name, MIXED), true_gradient(MIXED))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {"lam": 0.3}),
        ("gae", {"lam_alpha": 0.8}),
        ("n_step", {"n_steps": 1}),
        ("returns_minus_values", {}),
    ],
)
def test_exact_critic_gives_unbiased_gradient_for_any_lam_and_n(name, options):
    equal(estimated(name, values=tabular.exact_values(), **options), truth())


def test_biased_estimators_angle_to_true_gradient():
    """On this table; what follows from the formulas above, in numbers."""
    turned = {
        "group_normalized": expected_gradient(GROUP, normalized),
        "gae 0.8": with_the_critics_error(0.8),
        "online a2c": with_the_critics_error(0.0),
        "gamma 0.5": discounted(),
    }
    assert {name: round(cosine(g, truth()), 4) for name, g in turned.items()} == {
        "group_normalized": 0.9603,
        "gae 0.8": 0.9986,
        "online a2c": 0.9673,
        "gamma 0.5": 0.9928,
    }


# ------------------------------------------------------------------------- the optimal baseline


def squared_norms():
    """(C,) |grad log p(y)|^2 for the first prompt."""
    grads = [tabular.gradient(log_p) for log_p in tabular.log_probs()[0].sum(1)]
    return torch.stack([(g**2).sum() for g in grads])


@pytest.mark.proves("rlhf_pg.advantages.optimal_baseline")
def test_optimal_baseline_has_least_variance():
    """With the true norms, E[w (R - b - d)^2] is a parabola in d with its lowest point at 0."""
    chances, weights, paid = tabular.chances()[0], squared_norms(), PAID[0]

    def second_moment(b):
        return (chances * weights * (paid - b) ** 2).sum()

    # a row of its own in front, so that the others are exactly the expectation
    scores = torch.cat([torch.zeros(1).double(), paid])
    shares = torch.cat([torch.ones(1).double(), chances * weights])
    best = optimal_baseline(scores, shares, torch.zeros(8).long())[0]
    for d in (-1.0, -1e-2, 1e-2, 1.0):
        grown = second_moment(best + d) - second_moment(best)
        torch.testing.assert_close(grown, d**2 * (chances * weights).sum(), rtol=1e-9, atol=0)
    mean = (chances * paid).sum()
    assert second_moment(best) < 0.999 * second_moment(mean) < 0.999 * second_moment(0.0)


@pytest.mark.proves("rlhf_pg.advantages.optimal_baseline")
@pytest.mark.parametrize(
    ("weight", "pinned"), [("length", (0.6545, 0.9999)), ("norm", (0.6536, 0.995))]
)
def test_only_own_score_biases_optimal_baseline(weight, pinned):
    """`pinned`: the norm of the gradient with the row itself, over the true one, and the cosine."""
    weights = MASK.sum(1).double() if weight == "length" else squared_norms()
    group = torch.zeros(3).long()

    def of_the_others(said):
        scores = PAID[0, list(said)]
        return scores - optimal_baseline(scores, weights[list(said)], group)

    def own_included(said):
        scores, w = PAID[0, list(said)], weights[list(said)]
        return scores - (w * scores).sum() / w.sum()

    equal(expected_gradient(GROUP, of_the_others), truth())
    biased = expected_gradient(GROUP, own_included)
    share = (biased.norm() / truth().norm()).item()
    assert (round(share, 4), round(cosine(biased, truth()), 4)) == pinned
