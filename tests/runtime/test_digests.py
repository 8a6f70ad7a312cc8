"""A fingerprint changes with any bit and any exchange, and with nothing else."""

import pytest
import torch

from rlhf_pg.runtime.digests import WIDTH, digests, shown

SIZES = [1, 3, 64, 2 * WIDTH, 2 * WIDTH + 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_any_bit_changes_it(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x = (100 * torch.rand(size)).to(dtype)
    [before] = digests([x]).tolist()
    for place in {0, size // 2, size - 1}:
        for bit in range(8 * x.element_size()):
            changed = x.clone()
            changed.view(torch.uint8)[place * x.element_size() + bit // 8] ^= 1 << bit % 8
            assert digests([changed]).item() != before


@pytest.mark.parametrize("size", SIZES[2:])
def test_exchanged_values_change_it(size: int) -> None:
    x = torch.randn(size)
    for i, j in ((0, 2), (1, size - 2), (0, size // 2)):
        changed = x.clone()
        changed[i], changed[j] = x[j], x[i]
        assert digests([changed]).item() != digests([x]).item()


def test_same_values_have_the_same_wherever_they_are() -> None:
    x = torch.randn(WIDTH + 7)
    together = torch.cat([torch.zeros(3), x])  # at an odd place in memory
    assert digests([x, x.clone(), together[3:]]).unique().numel() == 1
    table = torch.randn(6, 8)
    assert digests([table.T]).item() == digests([table.T.contiguous()]).item()
    assert digests([]).tolist() == []
    assert shown(-1) == "f" * 16
