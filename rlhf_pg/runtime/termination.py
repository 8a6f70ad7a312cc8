"""Signals that end a run after its current step.

They are SIGTERM, which schedulers send before they take a machine away; SIGHUP, from a terminal
that is closed; and SIGINT (Ctrl-C).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlhf_pg.runtime.processes import Runtime

LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by launchers
POLL = 1.0  # seconds between two checks of our parent process
SAME = 2.0  # seconds in which a second signal is the first one, passed on by a launcher
TOLD = b"\nSIGINT: the step is finished and saved first; another Ctrl-C ends the run at once\n"


class Termination:
    """The state of a run that is to end once a signal has come, here or to another process.

    `stopping` is set on all processes together, once one of them has called `stop`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.stopping, self._stop = False, False
        self._asked: tuple[int, float] | None = None  # the first signal, and when it came

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Await signals inside the block: the first is noted, and a later one ends the process.

        Only the main thread can handle signals; in any other, they keep their effect. A signal that
        was ignored, as under nohup, stays ignored.
        """
        self.stopping, self._stop, self._asked = False, False, None
        in_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT] if in_main else []
        handlers = {number: signal.getsignal(number) for number in numbers}
        # None stands for a handler that is not Python's and could not be restored.
        theirs = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        self._process, ended = os.getpid(), threading.Event()
        try:
            for number in theirs:
                signal.signal(number, self._note)
            if any(name in os.environ for name in LAUNCHED):
                watched = (os.getppid(), ended)
                threading.Thread(target=self._watch_parent, args=watched, daemon=True).start()
            yield
        finally:
            ended.set()
            for number, old in theirs.items():
                signal.signal(number, old)

    def _watch_parent(self, parent: int, ended: threading.Event) -> None:
        """Treat the loss of the launcher as a SIGTERM, which it may not have passed on.

        Nobody else would end this process, and it would be in the way of the restarted run.
        """
        while not ended.wait(POLL):
            if os.getppid() != parent:
                self._asked = self._asked or (signal.SIGTERM, time.monotonic())
                return

    def _note(self, number: int, _: Any) -> None:
        if os.getpid() != self._process:  # a fork, of a reward function say, ends by it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # It does nothing else, since the main thread is interrupted at any point, say in a write.
        now = time.monotonic()
        if self._asked is None:
            self._asked = number, now
            if number == signal.SIGINT and self._runtime.is_main:
                with suppress(OSError):  # a closed terminal
                    os.write(2, TOLD)
            return
        launched = self._runtime.world > 1 or any(name in os.environ for name in LAUNCHED)
        # Nobody passes a Ctrl-C on to a process that no launcher started; a notebook lives on.
        if number == signal.SIGINT and not launched:
            raise KeyboardInterrupt
        if now > self._asked[1] + SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def asked(self) -> bool:
        """True if a signal has come to this process."""
        return self._asked is not None

    def stop(self) -> None:
        """Ask all processes to end the run after the step, as if it were the last."""
        self._stop = True

    def agreed(self) -> int:
        """Return the largest signal that has come to any process, or 0; collective.

        From then on `stopping` says whether any process has called `stop`.
        """
        number = self._asked[0] if self._asked else 0
        # One number for both: a signal ends the run whether or not it is to stop.
        agreed = self._runtime.all_reduce_max(number + 1 if number else int(self._stop))
        self.stopping = agreed > 0
        return max(agreed - 1, 0)
