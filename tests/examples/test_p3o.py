"""P3O: its loss against the formula, its gradient by enumeration, and rows that stay together."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_pg.report.metrics import Meter
from tests.advantages import tabular
from tests.advantages.tabular import MASK, SCORES
from tests.enumeration import COMPLETIONS, make_trainer
from tests.examples import load
from tests.losses.test_policy_gradients import NO_CLIP, OLD, POLICY, TRUTH, close
from tests.losses.test_policy_losses import (
    by_differences,
    clip,
    completions,
    equal,
    f64,
    few,
    gradient,
)
from tests.trainers.conftest import estimated

EXAMPLE = load("p3o")
p3o: Any = EXAMPLE.p3o


def test_rows_of_a_prompt_are_in_one_micro_batch(tmp_path) -> None:
    trainer = make_trainer(
        EXAMPLE.P3OTrainer, tmp_path, prompts=("ab", "a"), num_generations=3, micro_batch_tokens=5
    )
    experience, _ = estimated(trainer, COMPLETIONS[:6])
    [(_, batch)] = trainer.learner.micro_batches(experience)
    assert batch.num_rows == 6
    trainer.update(experience, Meter())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sampler", [POLICY, OLD])
def test_p3o_is_unbiased_on_policy_and_unclipped_off_policy(size, sampler):
    rows = torch.tensor(list(itertools.product(range(7), repeat=size)))
    groups = torch.arange(len(rows)).repeat_interleave(size)
    index = rows.flatten()
    logprobs, old = tabular.log_probs(POLICY)[index], tabular.log_probs(sampler).detach()[index]
    options = {} if sampler is POLICY else NO_CLIP
    per_token, _ = p3o(logprobs, old, SCORES[index, None], MASK[index], groups=groups, **options)
    chances = tabular.probabilities(sampler).detach()[rows].prod(1)
    of_group = per_token.sum(1).view(-1, size).mean(1)
    close(tabular.gradient((chances * of_group).sum(), POLICY), -TRUTH)


def p3o_by_pairs(logprobs, old, scores, mask, groups, stopped, low=0.8, high=1.2):
    """(B,), each unordered pair once: the two rows' shares of the paper's loss, by its formula."""
    rows = [i for i in range(len(mask)) if mask[i].any()]
    rho = {i: math.exp(sum((logprobs - old)[i, mask[i]].tolist())) for i in rows}
    still = {i: math.exp(sum((stopped - old)[i, mask[i]].tolist())) for i in rows}
    out = torch.zeros(len(mask), dtype=torch.float64)
    for i in rows:
        others = [j for j in rows if j != i and groups[j] == groups[i]]
        for j in others:
            q = still[j] * (scores[i] - scores[j]).item()
            out[i] -= min(rho[i] * q, clip(rho[i], low, high) * q) / len(others)
    return out


@st.composite
def grouped(draw):
    logprobs, old, scores, mask = draw(completions())
    groups = draw(st.lists(st.sampled_from([-3, 7]), min_size=len(mask), max_size=len(mask)))
    return logprobs, old, scores, mask, torch.tensor(groups)


@few
@given(case=grouped())
def test_p3o_matches_formula_shared_over_row_tokens(case):
    *inputs, groups = case
    logprobs, _, _, mask = inputs
    per_token, _ = p3o(*inputs, groups=groups)
    equal(per_token.sum(1), p3o_by_pairs(*inputs, groups, logprobs))
    for i, row in enumerate(mask):
        assert (per_token[i, ~row] == 0).all()
        assert (per_token[i, row] == per_token[i, row][:1]).all()


def test_p3o_gradient_matches_formula_with_fixed_other_ratio():
    noise = torch.Generator().manual_seed(0)
    logprobs, old = torch.randn(2, 6, 3, generator=noise, dtype=torch.float64) / 4
    scores = torch.randn(6, 1, generator=noise, dtype=torch.float64)
    mask = torch.rand(6, 3, generator=noise) < 0.8
    groups = torch.tensor([0, 1, 0, 0, 1, 1])

    def value(moved):
        return p3o_by_pairs(moved, old, scores, mask, groups, logprobs).sum()

    grad = gradient(lambda *x: p3o(*x, groups=groups), logprobs, old, scores, mask)
    equal(grad, by_differences(value, logprobs), 1e-8)


@pytest.mark.parametrize("side", [-1e-3, 1e-3])
@pytest.mark.parametrize(("kink", "score", "inside"), [(1.2, 1.0, -1), (0.8, -1.0, 1)])
def test_p3o_gradient_around_kinks(kink, score, inside, side):
    # The other row has ratio 1.5 and score 0: the slope is -rho 1.5 r inside, and 0 outside
    old = torch.zeros(2, 1).double()
    logprobs = f64([[math.log(kink) + side], [math.log(1.5)]])
    case = (logprobs, old, f64([[score], [0.0]]), torch.ones(2, 1).bool())
    slope = -score * 1.5 * math.exp(logprobs[0, 0]) if side * inside > 0 else 0
    grad = gradient(lambda *x: p3o(*x, groups=torch.zeros(2)), *case)
    assert grad[0].item() == pytest.approx(slope, rel=1e-12, abs=1e-15)
