"""What runs in other threads computes on the process's GPU."""

import torch

from rlhf_pg.boundary.user_code import begin, call_concurrently
from tests.device.pretend.extension import ext


async def current_device() -> int:
    return torch.cuda.current_device()


def test_threads_take_the_gpu_of_their_caller() -> None:
    """Batches ahead, and rewards of users, plain and async."""
    ext.set_devices(2)
    torch.cuda.set_device(1)
    try:
        assert call_concurrently(None, torch.cuda.current_device).result() == 1
        assert call_concurrently(None, current_device).result() == 1
        assert begin(current_device).result() == 1
    finally:
        torch.cuda.set_device(0)
        ext.set_devices(1)
