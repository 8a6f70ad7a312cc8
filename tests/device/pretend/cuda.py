"""`torch.cuda` of the pretend device: `install()` before anything looks for a GPU.

The counters are those of the whole process: `ext.kernels()`, `ext.syncs()` (waits of the host),
`ext.allocated()`, `ext.reserved()`; `waits` has the lines that waited.
"""

import contextlib
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.device.pretend.extension import ext  # before torch

import torch  # isort: skip

OURS = ("rlhf_pg",)
TOTAL = 80 * 10**9  # bytes


class Properties(NamedTuple):
    """Of an H100."""

    name: str = "NVIDIA H100 80GB HBM3 (pretend)"
    major: int = 9
    minor: int = 0
    total_memory: int = TOTAL
    multi_processor_count: int = 132
    L2_cache_size: int = 50 * 2**20
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    gcnArchName: str = ""
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    uuid: str = "GPU-pretend"
    pci_bus_id: int = 0


waits: Counter[tuple[str, str, str]] = Counter()  # by kind, kernel and line of code
_installed = False


def place() -> str:
    """The innermost line of our code that is running, and the innermost of all but torch's."""
    frame, inner = sys._getframe(1), None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        here = f"{name}:{frame.f_lineno}"
        if not name.startswith(("tests.device.pretend", "torch", "contextlib")):
            inner = inner or here
            if name.split(".")[0] in OURS or name.startswith("tests."):
                return here if here == inner else f"{here} <- {inner}"
        frame = frame.f_back  # type: ignore[assignment]
    beside = threading.current_thread() is not threading.main_thread()
    return f"(autograd) {inner}" if beside else inner or "?"


def _on_wait(kind: str, kernel: str) -> None:
    waits[kind, kernel, place()] += 1


def install(devices: int = 1) -> None:
    """Make so many devices, of 80 GB; `torch.compile` traces for them, and generates no code.

    Raises:
        RuntimeError: torch has already found that there is no GPU.
    """
    global _installed
    if _installed:
        return
    if not ext.has_cuda():
        raise RuntimeError("something asked torch for CUDA before the pretend device was there")
    _installed = True
    ext.set_devices(devices)
    _bindings()
    _module(devices)
    _streams()
    _storages()
    real = torch.compile

    def traced(model: Any = None, **options: Any) -> Any:
        options.pop("mode", None)
        return real(model, **{**options, "backend": lambda module, inputs: module.forward})

    torch.compile = traced  # type: ignore[assignment]
    ext.on_sync(_on_wait)


def _nothing(*_: Any, **options: Any) -> None: ...


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **options: value


def _bindings() -> None:
    """What `torch._C` would have with CUDA."""
    bindings: dict[str, Any] = {
        "getDeviceCount": ext.devices,
        "getDevice": ext.device,
        "setDevice": ext.set_device,
        "exchangeDevice": ext.exchange_device,
        "maybeExchangeDevice": lambda d: ext.device() if d < 0 else ext.exchange_device(d),
        "synchronize": lambda: ext.sync("synchronize", "torch.cuda.synchronize"),
        "emptyCache": ext.empty_cache,
        "isInBadFork": _constant(False),
        "getArchFlags": _constant("sm_90"),
        "getCompiledVersion": _constant(12080),
        "isCurrentStreamCapturing": _constant(False),
        "memoryStats": _memory_stats,
        "resetPeakMemoryStats": lambda device: ext.reset_peak(),
        "getAllocatorBackend": _constant("native"),
        "getCurrentRawStream": _constant(0),
        "get_sync_debug_mode": _constant(0),
        "hasPrimaryContext": _constant(True),
        "memorySnapshot": _constant({"segments": [], "device_traces": []}),
    }
    ignored = ("init", "resetAccumulatedMemoryStats", "ipc_collect", "setMemoryFraction")
    bindings |= dict.fromkeys((*ignored, "set_sync_debug_mode", "clearCublasWorkspaces"), _nothing)
    own = torch._C.__dict__
    own.update({f"_cuda_{name}": value for name, value in bindings.items()})  # type: ignore[attr-defined]
    own["_has_magma"] = False  # type: ignore[index]


def _memory_stats(device: Any) -> dict[str, Any]:
    used = {"current": ext.allocated(), "peak": ext.peak(), "allocated": 0, "freed": 0}
    reserved = {**used, "current": ext.reserved(), "peak": ext.reserved()}
    return {
        "allocated_bytes": {"all": used},
        "reserved_bytes": {"all": reserved},
        "active_bytes": {"all": used},
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _module(devices: int) -> None:
    """`torch.cuda` itself."""
    cuda: Any = torch.cuda
    properties = Properties()
    cuda._initialized = True
    cuda._lazy_init = _nothing
    cuda._lazy_call = lambda function, **_: function()
    for name in ("is_available", "_is_compiled", "is_initialized", "is_bf16_supported"):
        setattr(cuda, name, _constant(True))
    cuda.device_count = lambda: ext.devices()
    cuda._device_count_nvml = _constant(-1)
    cuda.get_device_properties = _constant(properties)
    cuda.get_device_name = _constant(properties.name)
    cuda.get_device_capability = _constant((9, 0))
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: (
        TOTAL - ext.reserved(),
        TOTAL,
    )
    cuda._exchange_device = ext.exchange_device
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice  # type: ignore[attr-defined]
    cuda.default_generators = tuple(ext.generator(i) for i in range(devices))
    cuda.set_sync_debug_mode = _nothing
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(  # type: ignore[attr-defined]
        size, stride, dtype=dtype, device="cuda"
    )
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = _constant(True)
    import torch.cuda.nvtx as nvtx

    ranges = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart")
    nvtx._nvtx = types.SimpleNamespace(**dict.fromkeys((*ranges, "deviceRangeEnd"), _constant(0)))


class Stream(torch.Stream):
    """A stream that is never behind: everything is in one order."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> "Stream":
        where = torch.device("cuda", ext.device()) if device is None else device
        return super().__new__(cls, device=where, priority=priority)

    cuda_stream = 0
    wait_stream = wait_event = _nothing
    __hash__ = _constant(1)

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        ext.sync("synchronize", "Stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **options: Any) -> None: ...

    record = wait = _nothing
    query = _constant(True)
    elapsed_time = _constant(0.0)

    def synchronize(self) -> None:
        ext.sync("synchronize", "Event.synchronize")


def _streams() -> None:
    cuda: Any = torch.cuda
    default = Stream()
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = cuda.default_stream = _constant(default)
    cuda.set_stream = _nothing
    cuda.stream = cuda.StreamContext = contextlib.nullcontext
    cuda.is_current_stream_capturing = _constant(False)


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages() -> None:
    """What Python's storages of a torch without CUDA cannot do."""
    import torch._utils
    import torch.storage

    of_cpu: Any = torch.UntypedStorage
    to, resize, new, copy = torch._utils._to, of_cpu.resize_, of_cpu.__new__, of_cpu.copy_

    def _to(self: Any, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if "cuda" not in (device.type, self.device.type):
            return to(self, device, non_blocking)
        if self.device == device:
            return self
        return _bytes_of(self).to(device, copy=True).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        ext.resize_storage(_bytes_of(self), size)
        return self

    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **options)
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def copy_(self: Any, source: Any, non_blocking: bool = False) -> Any:
        if "cuda" not in (self.device.type, source.device.type):
            return copy(self, source, non_blocking)
        _bytes_of(self).copy_(_bytes_of(source))
        return self

    torch._utils._to = torch.storage._to = _to  # type: ignore[attr-defined, assignment]
    of_cpu.resize_, of_cpu.copy_, of_cpu.__new__ = resize_, copy_, staticmethod(__new__)
