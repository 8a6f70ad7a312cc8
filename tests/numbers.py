"""What tests of numbers share: float64, comparison, and hypotheses that are quick to try."""

import numpy as np
import torch
from hypothesis import settings, strategies as st
from hypothesis.extra.numpy import arrays

few = settings(max_examples=15, deadline=None)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def equal(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def quarters(most=2):
    """Numbers up to `most` of either sign, whose sums are exact."""
    return st.integers(-4 * most, 4 * most).map(lambda i: i / 4)


@st.composite
def tokens(draw, count=3):
    """mask (B,T), and `count` (B,T) tensors with NaN in the slots that the mask hides."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    mask = draw(arrays(np.bool_, shape))
    numbers = [draw(arrays(float, shape, elements=quarters())) for _ in range(count)]
    return torch.tensor(mask), *(torch.tensor(np.where(mask, x, np.nan)) for x in numbers)
