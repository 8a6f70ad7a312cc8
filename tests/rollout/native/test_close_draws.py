"""Which draws rounding could have decided."""

import pytest
import torch

from rlhf_pg.rollout import SamplingParams
from rlhf_pg.rollout.native import close_draws as close_draws_module
from rlhf_pg.rollout.native.close_draws import Head, close_draws
from rlhf_pg.rollout.token_sampling import draw
from tests.rollout.test_token_sampling import noise_of


def test_greedy_draw_tells_lead_of_first_logit():
    logits = torch.tensor([[1.0, 3.5, 3.0], [2.0, 2.0, 0.0]])
    params, noise = SamplingParams(temperature=0), noise_of(2)
    drawn = draw(logits, params, noise)
    assert drawn.into.tolist() == [0.5, 0.0]
    assert close_draws(logits, params, drawn).tolist() == [False, True]


@pytest.mark.parametrize(("noise", "is_close"), [(0.5, True), (0.5 + 1e-4, False), (0.0, False)])
def test_draw_is_close_within_rounding_of_edge(noise, is_close):
    """Logits of size 1 in float32: an edge at 1/2 moves by at most 64 * 2^-23 / 2 = 4e-6."""
    for apart in (0.0, 3e-6, -3e-6):
        at = torch.tensor([max(noise + apart, 0.0)], dtype=torch.float64)
        logits, params = torch.ones(1, 2), SamplingParams()
        assert close_draws(logits, params, draw(logits, params, at)).tolist() == [is_close]
    beyond = torch.tensor([0.5 + 5e-6], dtype=torch.float64)
    assert not close_draws(logits, params, draw(logits, params, beyond)).any()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_p": 0.8, "top_k": 7, "temperature": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_disturbed_logits_change_no_draw_that_is_not_close(monkeypatch, fields):
    """Errors nearly as large as is allowed for, a hundred times those of rounding, so that some do.

    The bound is of first order: a tenth is left to what is of second.
    """
    monkeypatch.setattr(close_draws_module, "ROUNDING", 64e2)
    generator, params = torch.Generator().manual_seed(0), SamplingParams(**fields)
    changed, close = 0, []
    for vocab, scale, decimals in ((6, 1.0, 6), (40, 3.0, 1), (300, 1.0, 6), (300, 6.0, 6)):
        logits = torch.randn(4000, vocab, generator=generator) * scale
        logits = logits.round(decimals=decimals)  # one decimal: many are equal
        noise = torch.rand(4000, generator=generator, dtype=torch.float64)
        drawn = draw(logits, params, noise)
        is_close = close_draws(logits, params, drawn)
        error = 0.9 * 64e2 * 2**-23 * logits.abs().amax(dim=-1, keepdim=True)
        for _ in range(3):
            signs = torch.randint(0, 2, logits.shape, generator=generator) * 2 - 1
            other = draw(logits + error * signs, params, noise).ids != drawn.ids
            assert not (other & ~is_close).any()
            changed += int(other.sum())
        close.append(is_close.double().mean().item())
    assert changed > 50
    assert min(close) < 0.7  # not simply all


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 20}])
def test_few_draws_are_close(fields):
    logits = 3 * torch.randn(4000, 300, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(**fields)
    close = close_draws(logits, params, draw(logits, params, noise_of(4000)))
    assert close.double().mean() < 0.03


@pytest.mark.parametrize("slope", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_error_of_hidden_states_changes_no_draw_that_is_not_close(monkeypatch, slope, scale):
    """The rows of the output layer may change from the first id to the last in one direction."""
    monkeypatch.setattr(close_draws_module, "ROUNDING", 1e4)
    generator, params = torch.Generator().manual_seed(0), SamplingParams()
    width, vocab, rows = 16, 500, 8000
    weight = torch.randn(vocab, width, generator=generator)
    along = torch.linspace(-slope, slope, vocab)[:, None]
    weight = scale * (weight + along * torch.randn(width, generator=generator))
    head = Head(weight, weight.var(dim=0, correction=0).sum().sqrt())
    hidden = torch.randn(rows, width, generator=generator)
    logits = hidden @ weight.T
    noise = torch.rand(rows, generator=generator, dtype=torch.float64)
    drawn = draw(logits, params, noise)
    is_close = close_draws(logits, params, drawn, head)
    allowed = 1e4 * 2**-23 * logits.abs().amax(dim=-1)
    changed = 0
    for _ in range(3):
        error = torch.randn(rows, width, generator=generator)
        error *= 0.7 * (allowed / (error @ weight.T).abs().amax(dim=-1))[:, None]
        other = draw((hidden + error) @ weight.T, params, noise).ids != drawn.ids
        assert not (other & ~is_close).any()
        changed += int(other.sum())
    assert changed > 50
    without = close_draws(logits, params, drawn)
    assert not (is_close & ~without).any()
    if scale == 0.1 and not slope:  # all tokens are about as likely
        assert is_close.double().mean() < 0.3 * without.double().mean()
