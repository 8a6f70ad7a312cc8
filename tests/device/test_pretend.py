"""The pretend device refuses what a GPU refuses, and counts what a GPU would wait for."""

import threading

import pytest
import torch

from tests.device.pretend import cuda
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


def test_sync_is_traced_to_source_line() -> None:
    cuda.waits.clear()
    torch.ones(1, device="cuda").item()
    [(_, kernel, line)] = cuda.waits
    assert kernel == "aten::_local_scalar_dense"
    assert line.startswith("tests.device.test_pretend:")


def test_float_cumsum_raises_in_deterministic_mode() -> None:
    x = torch.ones(3, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            x.cumsum(0)
        assert x.long().cumsum(0).tolist() == [1, 2, 3]
    finally:
        torch.use_deterministic_algorithms(False)


def recorded(run, mode: str = "thread_local") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        run()
    return graph


def test_graph_reads_captured_memory() -> None:
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = recorded(lambda: out.copy_(2 * x))
    x += 1
    graph.replay()
    assert out.tolist() == [4, 4, 4]
    x = x + 1  # other memory
    graph.replay()
    assert out.tolist() == [4, 4, 4]


def test_sync_during_capture_raises() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="capturing"):
        recorded(lambda: x.sum().item())
    assert x.sum().item() == 3


@pytest.mark.parametrize(("mode", "breaks"), [("global", True), ("thread_local", False)])
def test_other_thread_breaks_only_global_mode_capture(mode, breaks) -> None:
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    errors: list[str] = []

    def wait() -> None:
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            errors.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        out.copy_(x)

    if breaks:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            recorded(run, mode)
        assert len(errors) == 1
    else:
        recorded(run, mode).replay()
        assert not errors
        assert out.tolist() == [1, 1, 1]


def test_freed_memory_is_reused() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    size = 4 * 2**20
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    place = x.data_ptr()
    del x
    assert torch.cuda.memory_reserved() >= before + size
    assert torch.empty(size, dtype=torch.uint8, device="cuda").data_ptr() == place
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()


def test_flash_attention_rejects_unsupported_inputs() -> None:
    flash = torch.ops.aten._flash_attention_forward
    ends = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    good = torch.ones(2, 1, 16, dtype=torch.bfloat16, device="cuda")
    assert flash(good, good, good, ends, ends, 2, 2, 0.0, True, False)[0].equal(good)
    for bad, limits in ((good.float(), ends), (good[..., :12], ends), (good, ends.long())):
        with pytest.raises(RuntimeError):
            flash(bad, bad, bad, limits, limits, 2, 2, 0.0, True, False)


def test_flash_attention_gradient_matches_softmax() -> None:
    """Of two sequences of 3 and 2 tokens, against attention written out in float32."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 5], dtype=torch.int32, device="cuda")
    inputs = [torch.randn(5, heads, 16).bfloat16() for heads in (4, 2, 2)]
    there = [x.cuda().requires_grad_() for x in inputs]
    out = torch.ops.aten._flash_attention_forward(*there, ends, ends, 3, 3, 0.0, True, False)[0]
    slope = torch.randn(5, 4, 16).bfloat16()
    out.backward(slope.cuda())
    here = [x.float().requires_grad_() for x in inputs]
    query, key, value = here[0], *(x.repeat_interleave(2, 1) for x in here[1:])
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    seen = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value)
    expected.backward(slope.float())
    torch.testing.assert_close(out.detach().cpu().float(), expected, atol=2e-2, rtol=2e-2)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a.grad.cpu().float(), b.grad, atol=3e-2, rtol=3e-2)
