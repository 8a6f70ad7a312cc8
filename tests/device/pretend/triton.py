"""A triton driver for a GPU that is not there: kernels are really compiled for sm_90, by triton's
own ptxas, and launched nowhere.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton.backends.nvidia.driver as nvidia
from torch._inductor import config as inductor
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

compiled: list[tuple[str, int]] = []  # name and shared memory of every kernel


class _Utils:
    """What an H100 says of itself."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1980000,
            "mem_clock_rate": 2619000,
            "mem_bus_width": 5120,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: Any) -> tuple[int, ...]:
        compiled.append((name, shared))
        return 1, 1, 255, 0, 1024

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **options: None


class _Launcher:
    launch_cooperative_grid = False
    num_ctas = 1
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, source: Any, metadata: Any) -> None: ...

    def __call__(self, *_: Any, **options: Any) -> None: ...


class _Driver:
    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = _Utils()

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: Any) -> None: ...

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return nvidia.ty_to_cpp(kind)

    def get_benchmarker(self) -> Callable[..., float]:
        return lambda run, **options: 1.0


def install() -> None:
    """Let triton find the GPU, and inductor give it every kernel in this process."""
    inductor.use_static_cuda_launcher = False
    inductor.compile_threads = 1
    driver.set_active(_Driver())
    nvidia.CudaDriver = _Driver
    if "nvidia" in backends:
        object.__setattr__(backends["nvidia"], "driver", _Driver)
