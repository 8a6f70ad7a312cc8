"""Masks over tokens, and statistics that must not see what a mask hides."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from rlhf_pg.masking import completion_mask, masked_mean, masked_var, whiten
from tests.numbers import f64, few

EOS, STOP, NAN = 2, 7, float("nan")
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@st.composite
def masked_numbers(draw, max_rows=4, max_width=6):
    """(x, mask), float64 and bool, with NaN in the slots that the mask hides."""
    shape = draw(st.tuples(st.integers(1, max_rows), st.integers(1, max_width)))
    mask = draw(arrays(np.bool_, shape))
    x = draw(arrays(np.float64, shape, elements=st.integers(-50, 50).map(lambda i: i / 4)))
    return torch.tensor(np.where(mask, x, np.nan)), torch.tensor(mask)


@pytest.mark.proves("rlhf_pg.masking.completion_mask")
@pytest.mark.parametrize(
    ("row", "eos", "expected"),
    [
        pytest.param([5, EOS, EOS], EOS, [1, 1, 0], id="pad-is-eos"),
        pytest.param([5, 6, EOS], EOS, [1, 1, 1], id="eos-last"),
        pytest.param([EOS, 5, 6], EOS, [1, 0, 0], id="eos-first"),
        pytest.param([5, 6, 4], EOS, [1, 1, 1], id="none"),
        pytest.param([5, EOS, 6, EOS], EOS, [1, 1, 0, 0], id="text-after-eos"),
        pytest.param([5, STOP, 6, EOS], (EOS, STOP), [1, 1, 0, 0], id="second-of-two-ids"),
        pytest.param([5, EOS, STOP, 6], (EOS, STOP), [1, 1, 0, 0], id="both-ids"),
        pytest.param([0, 0, 0], 0, [1, 0, 0], id="id-zero"),
        pytest.param([5, 6], [], [1, 1], id="no-ids"),
    ],
)
def test_completion_ends_at_first_eos(row, eos, expected):
    mask = completion_mask(torch.tensor([row]), eos)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [expected]


@pytest.mark.proves("rlhf_pg.masking.masked_mean")
def test_masked_mean_by_hand():
    x, mask = f64([[1, 2, NAN], [6, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert masked_mean(x, mask).item() == 3  # (1 + 2 + 6) / 3
    assert masked_mean(x, mask, dim=1).tolist() == [1.5, 6]
    assert masked_mean(x, mask, dim=0).tolist() == [3.5, 2, 0]  # no True slot in the last column


@pytest.mark.proves("rlhf_pg.masking.masked_var")
def test_masked_var_by_hand():
    x, mask = f64([[1, 2, NAN], [3, 6, NAN]]), torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    # mean 3; squares 4 + 1 + 0 + 9 = 14
    assert masked_var(x, mask).item() == 14 / 4
    assert masked_var(x, mask, unbiased=True).item() == pytest.approx(14 / 3, rel=1e-15)


@pytest.mark.proves("rlhf_pg.masking.masked_mean", "rlhf_pg.masking.masked_var")
@few
@given(case=masked_numbers())
def test_mean_and_variance_use_only_unmasked_slots(case):
    x, mask = case
    seen = x.numpy()[mask.numpy()]
    if len(seen) > 0:
        assert masked_mean(x, mask).item() == pytest.approx(np.mean(seen), abs=1e-12)
        assert masked_var(x, mask).item() == pytest.approx(np.var(seen), abs=1e-12)
    if len(seen) > 1:
        assert masked_var(x, mask, unbiased=True).item() == pytest.approx(np.var(seen, ddof=1))
    for row, row_mask, mean in zip(x, mask, masked_mean(x, mask, dim=1), strict=True):
        alone = [v for v, real in zip(row.tolist(), row_mask.tolist(), strict=True) if real]
        assert mean.item() == pytest.approx(sum(alone) / max(len(alone), 1), abs=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("true_slots", [0, 1])
def test_variance_of_fewer_than_two_slots_is_zero(true_slots, unbiased):
    x, mask = f64([[3.5, NAN]]), torch.tensor([[bool(true_slots), False]])
    assert masked_var(x, mask, unbiased).item() == 0
    assert masked_mean(x, mask).item() == 3.5 * true_slots


def test_masked_mean_gives_masked_slots_no_gradient():
    x = f64([[1, NAN], [2, 3]]).requires_grad_()
    masked_mean(x, torch.tensor([[1, 0], [1, 1]]).bool()).backward()
    assert torch.equal(x.grad, f64([[1 / 3, 0], [1 / 3, 1 / 3]]))


def test_one_column_mask_covers_whole_rows():
    x, mask = f64([[1, 2], [NAN, NAN]]), torch.tensor([[True], [False]])
    assert masked_mean(x, mask).item() == 1.5
    assert masked_var(x, mask).item() == 0.25
    assert whiten(x, mask)[1].tolist() == [0, 0]


@pytest.mark.proves("rlhf_pg.masking.whiten")
def test_whiten_by_hand():
    x, mask = f64([[1, 2, NAN], [3, 6, NAN]]), torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    scale = (14 / 4 + 1e-8) ** -0.5  # mean 3, population variance 14/4
    expected = f64([[-2, -1, 0], [0, 3, 0]]) * scale
    torch.testing.assert_close(whiten(x, mask), expected, rtol=1e-14, atol=0)
    shifted = torch.where(mask, expected + 3, 0.0)
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), shifted, rtol=1e-14, atol=0)


def test_whiten_adds_epsilon_to_variance():
    # mean 1e-4, variance 1e-8: 1e-4 / sqrt(1e-8 + 1e-8) = 1 / sqrt(2); to the std it would be 1
    whitened = whiten(f64([[0, 2e-4]]), torch.ones(1, 2).bool())
    torch.testing.assert_close(whitened, f64([[-(0.5**0.5), 0.5**0.5]]))


@pytest.mark.proves("rlhf_pg.masking.whiten")
@few
@given(case=masked_numbers())
def test_whitened_numbers_have_mean_zero_and_variance_one(case):
    x, mask = case
    whitened = whiten(x, mask)
    assert (whitened[~mask] == 0).all()
    assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-9)
    spread = masked_var(x, mask).item()
    assert masked_var(whitened, mask).item() == pytest.approx(spread / (spread + 1e-8))


@pytest.mark.proves("rlhf_pg.masking.whiten")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [[5.3], [0.1] * 7, [1e6 + 0.1] * 3, []])
def test_whiten_without_variance_gives_exactly_zero(row, dtype):
    x, mask = torch.tensor([[*row, NAN]], dtype=dtype), torch.tensor([[True] * len(row) + [False]])
    assert (whiten(x, mask) == 0).all()
    kept = whiten(x, mask, shift_mean=False)[mask]  # only the mean is left, up to its rounding
    torch.testing.assert_close(kept, x[mask])


@pytest.mark.proves("rlhf_pg.masking.whiten")
def test_whiten_uses_given_statistics():
    x, mask = f64([[1, 5, NAN]]), torch.tensor([[True, True, False]])
    stats = (f64(2), f64(9))  # its own are 3 and 4
    expected = f64([[-1, 3, 0]]) / (9 + 1e-8) ** 0.5
    torch.testing.assert_close(whiten(x, mask, stats=stats), expected)
    kept = whiten(x, mask, shift_mean=False, stats=stats)
    torch.testing.assert_close(kept, torch.where(mask, expected + 2, 0.0))


@pytest.mark.proves("rlhf_pg.masking.whiten")
@few
@given(case=masked_numbers(), cut=st.integers(0, 4))
def test_ranks_sharing_statistics_whiten_like_one(case, cut):
    x, mask = case
    stats = masked_mean(x, mask), masked_var(x, mask)
    parts = [whiten(x[s], mask[s], stats=stats) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(torch.cat(parts), whiten(x, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", [0.0, 7e-4])
def test_zero_variance_statistics_give_zero(noise):
    # 10_000.1 in float32 on every process: its mean may be off by an ulp (1e-3)
    x = torch.full((1, 4), 10_000.1)
    stats = (x.mean() + noise, torch.tensor(noise**2))
    assert (whiten(x, torch.ones(1, 4).bool(), stats=stats) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten])
def test_dtype_is_kept_and_result_rounded_once(function, dtype):
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (10 + x).to(dtype)
    mask = torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    result = function(x, mask)
    assert result.dtype == dtype
    half_ulp = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        result.double(), function(x.double(), mask), rtol=half_ulp * 1.01, atol=1e-6
    )


@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten])
def test_integers_become_floats(function):
    result = function(torch.tensor([[1, 2]]), torch.tensor([[True, True]]))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), function(f64([[1, 2]]), torch.ones(1, 2).bool()))


@few
@given(case=masked_numbers(), pad=st.integers(0, 5))
def test_extra_padding_leaves_results_unchanged(case, pad):
    x, mask = case
    wide = torch.cat([x, torch.full((len(x), pad), NAN, dtype=x.dtype)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(len(x), pad, dtype=torch.bool)], dim=1)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for function in (masked_mean, masked_var):
        torch.testing.assert_close(function(wide, wide_mask), function(x, mask), **close)
    padded = whiten(wide, wide_mask)
    torch.testing.assert_close(padded[:, : x.shape[1]], whiten(x, mask), **close)
    assert (padded[:, x.shape[1] :] == 0).all()


@pytest.mark.parametrize("given", [False, True])
def test_huge_numbers_are_whitened_without_overflow(given):
    x, mask = torch.tensor([[1.0, 0.0, 2.0, 0.0]]), torch.ones(1, 4).bool()
    huge = x * 2.0**80
    stats = (huge.double().mean(), huge.double().var(correction=0)) if given else None
    expected = (x - 0.75) / 0.6875**0.5  # squares 1/16, 9/16, 25/16, 9/16 over 4
    torch.testing.assert_close(whiten(huge, mask, stats=stats), expected)
