"""SIGTERM, which schedulers send before they take a machine away: a run ends after its step."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_pg.runtime.processes import Runtime

SAME = 2.0  # seconds in which a second signal is the first once more: a launcher passes it on


class Termination:
    """Whether a run is to end: SIGTERM has come, here or to another process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: float | None = None  # when
        self._process = os.getpid()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Around a run. The first SIGTERM is noted, and one that comes later ends the process.

        Only the main thread can do so; in another one, SIGTERM is what it was.
        """
        self._asked, self._process = None, os.getpid()
        old = signal.getsignal(signal.SIGTERM)
        # None: a handler that is not Python's, and could not be put back.
        if threading.current_thread() is not threading.main_thread() or old is None:
            yield
            return
        signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, old)

    def _note(self, *_: Any) -> None:
        # Nothing else: whatever the main thread was at, a write for one, is only interrupted here.
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        # A reward's own process, a fork, has inherited this and is to end like any other.
        if os.getpid() != self._process or now > self._asked + SAME:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self) -> bool:
        """Whether it has come to any process; collective."""
        asked = torch.tensor(float(self._asked is not None), device=self._runtime.device)
        return bool(self._runtime.total(asked) > 0)
