"""Streams, events and CUDA graphs of the pretend device, where everything is in one order."""

import time
from typing import Any

import torch

from tests.device.pretend.extension import ext

recorded: list[int] = []  # kernels of each graph that was recorded
modes: list[str] = []  # in which they were recorded
replays = 0


class Stream(torch.Stream):
    """A stream that is never behind."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> "Stream":
        where = torch.device("cuda", ext.device()) if device is None else device
        return super().__new__(cls, device=where, priority=priority)

    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        ext.sync("synchronize", "Stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **options: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        ext.sync("synchronize", "Event.synchronize")

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.time - self.time)


class CUDAGraph:
    """What was launched, again, on the same addresses."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        modes.append(capture_error_mode)
        ext.begin_capture(capture_error_mode == "global")

    def capture_end(self) -> None:
        self._graph = ext.end_capture()
        recorded.append(self._graph.kernels)

    def replay(self) -> None:
        global replays
        replays += 1
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class graph:
    """`torch.cuda.graph`, which waits for the device first, and empties the cache."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.graph, self.mode = cuda_graph, capture_error_mode

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.graph.capture_begin(capture_error_mode=self.mode)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.graph.capture_end()
