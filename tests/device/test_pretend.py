"""The pretend device refuses what a GPU refuses, and counts what a GPU would wait for."""

import pytest
import torch

from tests.device.pretend.extension import ext


def waits_of(run) -> int:
    before = ext.syncs()
    run()
    return ext.syncs() - before


def test_tensors_on_two_devices_raise() -> None:
    a, b = torch.ones(3, device="cuda"), torch.ones(3)
    for mixed in (lambda: a + b, lambda: torch.cat([a, b]), lambda: a[:, None] @ b[None]):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (a + torch.tensor(2.0)).tolist() == [3, 3, 3]  # one number may come from the host


def test_cpu_generator_raises() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())


def test_cpu_only_kernel_raises() -> None:
    x = torch.ones(1, 1, 2, 8, device="cuda")
    with pytest.raises(RuntimeError, match="'CUDA' backend"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)


def test_empty_memory_is_garbage() -> None:
    assert torch.empty(3, device="cuda").isnan().all()


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (lambda x, i: x.sum().item(), 1),
        (lambda x, i: x.tolist(), 1),
        (lambda x, i: x[x > 0], 1),
        (lambda x, i: x[i.cpu()], 2),  # to the host, and back as an index
        (lambda x, i: x[i], 0),
        (lambda x, i: bool(x.isnan().any()), 1),
        (lambda x, i: x.to("cpu", non_blocking=True), 0),  # torch pins where it goes
        (lambda x, i: torch.ones(3).to("cuda"), 1),
        (lambda x, i: torch.ones(3).pin_memory().to("cuda", non_blocking=True), 0),
        (lambda x, i: torch.where(x > 0, x, 0.0).sum(), 0),
        (lambda x, i: torch.repeat_interleave(x, i), 1),
        (lambda x, i: torch.repeat_interleave(x, i, output_size=3), 0),
    ],
)
def test_syncs_are_counted(act, waits) -> None:
    x, i = torch.ones(3, device="cuda"), torch.tensor([0, 1, 2], device="cuda")
    assert waits_of(lambda: act(x, i)) == waits
