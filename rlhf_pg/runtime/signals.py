"""SIGTERM, which schedulers send before they take a machine away: a run ends after its step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_pg.runtime.processes import Runtime


class Termination:
    """Whether a run is to end: SIGTERM has come, here or to another process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Around a run. The first SIGTERM is noted, and the second ends the process at once.

        Only the main thread can do so; in another one, SIGTERM is what it was.
        """
        self._asked = False
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
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Whether it has come to any process; collective."""
        asked = torch.tensor(float(self._asked), device=self._runtime.device)
        return bool(self._runtime.total(asked) > 0)
