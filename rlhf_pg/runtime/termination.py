"""Signals after which a run ends with its step: SIGTERM, which schedulers send before they take a
machine away; SIGHUP, of a terminal that is closed; in several processes SIGINT (Ctrl-C) as well.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_pg.boundary.launcher import launcher
from rlhf_pg.runtime.processes import Runtime

LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # a launcher tells its processes
POLL = 1.0  # seconds between two looks at who our parent is
SAME = 2.0  # seconds in which a second signal is the first once more: a launcher passes it on


class Termination:
    """Whether a run is to end: a signal has come, here or to another process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: tuple[int, float] | None = None  # by which signal, and when
        self._process = os.getpid()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Around a run. The first signal is noted, and one that comes later ends the process.

        Only the main thread can do so; in another one, signals are what they were. One that was
        ignored, as under nohup, still is.
        """
        self._asked, self._process = None, os.getpid()
        in_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in self._numbers() if in_main}
        # None: a handler that is not Python's, and could not be put back.
        theirs = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        ended = threading.Event()
        try:
            for number in theirs:
                signal.signal(number, self._note)
            if any(name in os.environ for name in LAUNCHED):
                watch = threading.Thread(target=self._watch_parent, args=(ended,), daemon=True)
                watch.start()
            yield
        finally:
            ended.set()
            for number, old in theirs.items():
                signal.signal(number, old)

    def _watch_parent(self, ended: threading.Event) -> None:
        """A launcher that is gone, as by a SIGTERM that it does not pass on, is a SIGTERM here:
        nobody would end this process, and the run that is started again would find it in its way.
        """
        parent = launcher()
        while not ended.wait(POLL):
            if os.getppid() != parent:
                if self._asked is None:
                    self._asked = signal.SIGTERM, time.monotonic()
                return

    def _numbers(self) -> list[signal.Signals]:
        # One process alone ends by KeyboardInterrupt; one of several would leave the others.
        interrupt = [signal.SIGINT] if self._runtime.world > 1 else []
        return [signal.SIGTERM, signal.SIGHUP, *interrupt]

    def _note(self, number: int, _: Any) -> None:
        # Nothing else: whatever the main thread was at, a write for one, is only interrupted here.
        now = time.monotonic()
        if self._asked is None:
            self._asked = number, now
        # A reward's own process, a fork, has inherited this and is to end like any other.
        if os.getpid() != self._process or now > self._asked[1] + SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self) -> int:
        """The signal that has come to any process, the largest of several; or 0. Collective."""
        return self._runtime.all_reduce_max(self._asked[0] if self._asked else 0)
