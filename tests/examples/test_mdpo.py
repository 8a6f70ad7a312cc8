"""MDPO: its loss by the formula, and its penalty by enumeration."""

import math

import torch

from tests.advantages import tabular
from tests.advantages.tabular import SCORES
from tests.examples import load
from tests.losses.test_policy_gradients import (
    OLD,
    OLD_PROBABILITIES,
    POLICY,
    close,
    expected_gradient,
    in_visited_states,
    off_by,
)

mdpo = load("mdpo").mdpo


def test_loss_by_formula() -> None:
    rho, advantage = 1.5, 2.0
    case = (torch.tensor([[rho]]).double().log(), torch.zeros(1, 1).double())
    per_token, _ = mdpo(*case, torch.tensor([[advantage]]).double(), torch.ones(1, 1).bool(), 0.7)
    expected = -rho * advantage + 0.7 * (rho * math.log(rho) - rho + 1)
    assert abs(per_token.item() - expected) < 1e-12


def test_mdpo_is_gradient_of_kl_new_old_in_old_states():
    nothing = torch.zeros_like(SCORES)
    penalty = expected_gradient(lambda *x: mdpo(*x, old_kl_coef=0.7), scores=nothing)
    log_pi, log_old = POLICY.log_softmax(-1), OLD.log_softmax(-1).detach()
    local = in_visited_states((log_pi.exp() * (log_pi - log_old)).sum(1))
    close(penalty, 0.7 * tabular.gradient(local, POLICY))
    log_ratio = tabular.log_probs(POLICY).nansum(1) - OLD_PROBABILITIES.log()
    whole = 0.7 * tabular.gradient((tabular.probabilities(POLICY) * log_ratio).sum(), POLICY)
    assert off_by(penalty, whole) > 0.1
