"""Running statistics against those of everything at once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rlhf_pg.running_stats import MovingAverage, RunningMoments
from tests.numbers import few

numbers = st.lists(st.integers(-400, 400).map(lambda i: i / 8), max_size=6)
batches = st.lists(numbers, min_size=1, max_size=6)


def moments_of(*batches, shift=0.0):
    moments = RunningMoments()
    for batch in batches:
        x = np.array(batch) + shift
        if len(x):
            moments.update(len(x), x.mean().item(), x.var().item())
        else:
            moments.update(0, math.nan, math.nan)
    return moments


@pytest.mark.proves("rlhf_pg.running_stats.RunningMoments")
def test_moments_of_two_batches_by_hand():
    # 1, 3 (mean 2, var 1) and 6, 6, 9 (mean 7, var 2): mean 25/5; 16 + 4 + 1 + 1 + 16 = 38
    moments = RunningMoments()
    moments.update(2, 2.0, 1.0)
    assert (moments.count, moments.mean, moments.var) == (2, 2, 1)
    moments.update(3, 7.0, 2.0)
    assert (moments.count, moments.mean) == (5, pytest.approx(5, rel=1e-15))
    assert moments.var == pytest.approx(38 / 5, rel=1e-15)
    assert moments.std == pytest.approx((38 / 5) ** 0.5, rel=1e-15)


@pytest.mark.proves("rlhf_pg.running_stats.RunningMoments")
@few
@given(batches=batches, shift=st.sampled_from([0.0, -1000.0]))
def test_moments_match_whole_data_for_any_split(batches, shift):
    moments = moments_of(*batches, shift=shift)
    everything = np.array([x for batch in batches for x in batch]) + shift
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-12, abs=1e-12)
        assert moments.var == pytest.approx(everything.var(), rel=1e-12, abs=1e-9)


def test_numbers_before_any_update_are_unchanged():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    assert RunningMoments().normalize(x).equal(x)
    assert RunningMoments().denormalize(x).equal(x)


@pytest.mark.proves("rlhf_pg.running_stats.RunningMoments.normalize")
def test_normalize_and_denormalize_by_hand():
    moments = RunningMoments(count=4, mean=3.0, var=4.0)
    x = torch.tensor([[3.0, 5.0], [-1.0, 4.0]])
    assert moments.normalize(x).tolist() == [[0, 1], [-2, 0.5]]
    assert moments.denormalize(moments.normalize(x)).equal(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_result_rounded_once(dtype):
    moments = RunningMoments(count=4, mean=100.3, var=0.07)
    x = torch.linspace(99, 101, 20).to(dtype)
    for function in (moments.normalize, moments.denormalize):
        assert function(x).dtype == dtype
        rtol = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            function(x).double(), function(x.double()), rtol=1.01 * rtol, atol=1e-4
        )


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_is_shifted_to_zero_and_never_scaled_up(constant, dtype):
    x = torch.full((7,), constant, dtype=dtype)
    moments = RunningMoments()
    for _ in range(5):
        moments.update(7, x.mean().item(), x.var(correction=0).item())
    assert moments.std == 1
    assert moments.normalize(x).abs().max() <= 2 * torch.finfo(dtype).eps * abs(constant)
    assert moments.normalize(x + 1).tolist() == pytest.approx([1] * 7, abs=0.1)
    torch.testing.assert_close(moments.denormalize(moments.normalize(x)), x)


@pytest.mark.parametrize(
    "batch",
    [
        *((-1, 0.0, 1.0), (math.nan, 0.0, 1.0), (math.inf, 0.0, 1.0), (2, math.nan, 1.0)),
        *((2, math.inf, 1.0), (2, 0.0, -1e-9), (2, 0.0, math.nan), (2, 0.0, math.inf)),
    ],
)
def test_moments_with_invalid_batch_raise(batch):
    moments = RunningMoments(count=2, mean=1.0, var=4.0)
    with pytest.raises(ValueError, match=r"RunningMoments\.update takes a finite count"):
        moments.update(*batch)
    assert moments == RunningMoments(count=2, mean=1.0, var=4.0)


@pytest.mark.proves("rlhf_pg.running_stats.MovingAverage")
def test_moving_average_by_hand():
    # decay 1/2: m = 4, then 2 + 1 = 3, then 1.5 + 8 = 9.5; corrected by 1/2, 3/4, 7/8
    average = MovingAverage(decay=0.5)
    assert average.value == 0
    for x, value in ((8.0, 8.0), (2.0, 4.0), (16.0, 76 / 7)):
        average.update(x)
        assert average.value == pytest.approx(value, rel=1e-15)


@pytest.mark.proves("rlhf_pg.running_stats.MovingAverage")
@few
@given(xs=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=20))
def test_moving_average_is_mean_with_decaying_weights(xs):
    average = MovingAverage()
    for x in xs:
        average.update(x)
    weights = [0.9**age for age in reversed(range(len(xs)))]
    expected = sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
    assert average.value == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_moving_average_decay_out_of_range_raises(decay):
    with pytest.raises(ValueError, match="MovingAverage: decay must be"):
        MovingAverage(decay=decay)


@pytest.mark.parametrize("x", [math.nan, math.inf])
def test_moving_average_with_non_finite_number_raises(x):
    average = MovingAverage()
    average.update(2.0)
    with pytest.raises(ValueError, match="finite"):
        average.update(x)
    assert average.value == pytest.approx(2)
