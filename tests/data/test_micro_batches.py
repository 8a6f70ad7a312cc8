"""Which rows are computed together."""

from itertools import groupby

import pytest
from hypothesis import given, settings, strategies as st

from rlhf_pg.data.micro_batches import RowLengths, split_packed, split_padded

# Two families of group 5, one of group 6: prompts of 10, 4 and 3 tokens.
ROWS = [
    *(RowLengths(0, 10, completion) for completion in (1, 4, 2)),
    RowLengths(1, 4, 3),
    *(RowLengths(2, 3, completion) for completion in (5, 6)),
]


def tokens(rows, own):
    """Of a packed batch: the prompt of a family counts where its first row begins."""
    total, before = 0, None
    for i in own:
        total += rows[i].completion + (rows[i].prompt if rows[i].family != before else 0)
        before = rows[i].family
    return total


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (38, [[1, 2, 0, 5, 4, 3]]),  # 17 + 14 + 7: everything
        (24, [[1, 2, 0, 3], [5, 4]]),  # the piece of 7 fits beside the 17
        (16, [[1, 2], [5, 4], [0], [3]]),  # a family is split, its prompt computed twice
        (14, [[1], [5, 4], [2, 0], [3]]),
        (1, [[1], [2], [0], [5], [4], [3]]),
    ],
)
def test_packed_split_by_hand(limit, expected):
    assert split_packed(ROWS, limit) == expected


def test_padded_split_by_hand():
    # Widths 11, 14, 12, 7, 8, 9: the widest first, each batch as wide as its widest two parts.
    assert split_padded(ROWS, 42) == [[1, 2, 0], [5, 4, 3]]
    assert split_padded(ROWS, 41) == [[1, 2], [0, 5], [4, 3]]
    assert split_padded(ROWS, 1) == [[1], [2], [0], [5], [4], [3]]


@st.composite
def some_rows(draw):
    rows, family = [], 0
    for _group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 2))):
            prompt = draw(st.integers(1, 9))
            lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
            rows += [RowLengths(family, prompt, length) for length in lengths]
            family += 1
    return rows


@settings(max_examples=100, deadline=None)
@given(rows=some_rows(), limit=st.integers(1, 60))
def test_split_covers_every_row_once_within_limit_and_keeps_families_together(rows, limit):
    for split in (split_packed, split_padded):
        batches = split(rows, limit)
        assert sorted(i for own in batches for i in own) == list(range(len(rows)))
        for own in batches:
            width = max(rows[i].prompt for i in own) + max(rows[i].completion for i in own)
            cost = tokens(rows, own) if split is split_packed else len(own) * width
            assert cost <= limit or len(own) == 1
    for own in split_packed(rows, limit):
        families = [family for family, _ in groupby(rows[i].family for i in own)]
        assert len(families) == len(set(families))
        for _, part in groupby(own, key=lambda i: rows[i].family):
            lengths = [rows[i].completion for i in part]
            assert lengths == sorted(lengths, reverse=True)
