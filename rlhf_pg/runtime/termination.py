"""Signals that end a run after its current step.

They are SIGTERM, which schedulers send before they take a machine away; SIGHUP, from a terminal
that is closed; and with several processes SIGINT (Ctrl-C) as well.
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

LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by launchers
POLL = 1.0  # seconds between two checks of our parent process
SAME = 2.0  # seconds in which a second signal is the first one, passed on by a launcher


class Termination:
    """The state of a run that is to end once a signal has come, here or to another process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: tuple[int, float] | None = None  # the first signal, and when it came
        self._process = os.getpid()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Await signals inside the block: the first is noted, and a later one ends the process.

        Only the main thread can handle signals; in any other, they keep their effect. A signal that
        was ignored, as under nohup, stays ignored.
        """
        self._asked, self._process = None, os.getpid()
        in_main = threading.current_thread() is threading.main_thread()
        # A single process ends by KeyboardInterrupt; one of several would desert the others.
        interrupt = [signal.SIGINT] if self._runtime.world > 1 else []
        numbers = [signal.SIGTERM, signal.SIGHUP, *interrupt] if in_main else []
        handlers = {number: signal.getsignal(number) for number in numbers}
        # None stands for a handler that is not Python's and could not be restored.
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
        """Treat the loss of the launcher, which may not pass a SIGTERM on, as a SIGTERM.

        Nobody else would end this process, and it would be in the way of the restarted run.
        """
        parent = launcher()
        while not ended.wait(POLL):
            if os.getppid() != parent:
                if self._asked is None:
                    self._asked = signal.SIGTERM, time.monotonic()
                return

    def _note(self, number: int, _: Any) -> None:
        # It does nothing else, since the main thread is interrupted at any point, say in a write.
        now = time.monotonic()
        if self._asked is None:
            self._asked = number, now
        # A reward's forked process has inherited this handler and must end like any other.
        if os.getpid() != self._process or now > self._asked[1] + SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self) -> int:
        """Return the largest signal that has come to any process, or 0; collective."""
        return self._runtime.all_reduce_max(self._asked[0] if self._asked else 0)
