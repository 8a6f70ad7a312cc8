"""The ends of a run on all processes: by a signal, or because one of them has failed or hangs.

A signal ends a run after its current step. They are SIGTERM, which schedulers send before they take
a machine away; SIGHUP, from a terminal that is closed; and SIGINT (Ctrl-C).

A process inside a collective notices no failure of another: no exception reaches Python until the
operation returns. So each process has a thread that once a second reads a key of
torch.distributed's own store, under which the first failure is written.
"""

import faulthandler
import functools
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

P = ParamSpec("P")
R = TypeVar("R")

LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by launchers
POLL = 1.0  # seconds between two reads of the store, and two checks of our parent process
SAME = 2.0  # seconds in which a second signal is the first one, passed on by a launcher
TOLD = b"\nSIGINT: the step is finished and saved first; another Ctrl-C ends the run at once\n"

PARTING = 120.0  # seconds to wait for other processes to save, once the launcher is gone
GRACE = 5.0  # seconds for other processes to answer, or to end by an error of their own
LONGEST = 20_000  # characters of a failure
NUMBERS = itertools.count()  # of watches: the same in every process

# Messages of gloo when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
GONE = "The connection to another process was lost: it was killed (out of memory?), or has left."


class Terminated(SystemExit):
    """The exit of all processes together after a signal, which is not a failure of any of them."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)  # the convention of shells


class Termination:
    """The state of a run that is to end once a signal has come, here or to another process."""

    def __init__(self, runtime: Any) -> None:  # a `Runtime`, whose file imports this one
        self._runtime = runtime
        self.stopping, self._stop = False, False
        self.asked: tuple[int, float] | None = None  # the first signal, and when it came

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Await signals inside the block: the first is noted, and a later one ends the process.

        They keep their effect outside the main thread, which alone can handle them, and a signal
        that was ignored, as under nohup, stays ignored.
        """
        self.stopping, self._stop, self.asked = False, False, None
        in_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT] if in_main else []
        handlers = {number: signal.getsignal(number) for number in numbers}
        # None: a handler that is not Python's and could not be restored.
        theirs = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        self._process, ended = os.getpid(), threading.Event()
        self._launched = any(name in os.environ for name in LAUNCHED)
        try:
            for number in theirs:
                signal.signal(number, self._note)
            if self._launched:
                watched = (os.getppid(), ended)
                threading.Thread(target=self._watch_parent, args=watched, daemon=True).start()
            yield
        finally:
            ended.set()
            for number, old in theirs.items():
                signal.signal(number, old)

    def _watch_parent(self, parent: int, ended: threading.Event) -> None:
        """Treat the loss of the launcher, which would leave this process running, as a SIGTERM."""
        while not ended.wait(POLL):
            if os.getppid() != parent:
                self.asked = self.asked or (signal.SIGTERM, time.monotonic())
                return

    def _note(self, number: int, _: Any) -> None:
        if os.getpid() != self._process:  # a fork, of a reward function say, ends by it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # It does nothing else, since the main thread is interrupted at any point, say in a write.
        now = time.monotonic()
        if self.asked is None:
            self.asked = number, now
            if number == signal.SIGINT and self._runtime.is_main:
                with suppress(OSError):  # a closed terminal
                    os.write(2, TOLD)
            return
        # Nobody passes a Ctrl-C on to a process that no launcher started; a notebook lives on.
        if number == signal.SIGINT and self._runtime.world == 1 and not self._launched:
            raise KeyboardInterrupt
        if now > self.asked[1] + SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop(self) -> None:
        """Ask all processes to end the run after the step, as if it were the last."""
        self._stop = True

    def agreed(self) -> int:
        """Return the largest signal that has come to any process, or 0; collective.

        From then on `stopping` says whether the run is to end, on all processes together.
        """
        own = (self.asked[0] if self.asked else 0, self._stop)
        numbers, stops = zip(*self._runtime.gather_objects(own), strict=True)
        self.stopping = any(numbers) or any(stops)
        return int(max(numbers))


class Failure(NamedTuple):
    """The first process that failed, and why, as the store has it."""

    rank: int
    text: str
    hung: bool = False


class Watch:
    """A thread that tells the others of a failure here, and ends this process after one elsewhere.

    A process that waits for others ends `GRACE` seconds after it heard of the failure, unless an
    error ends it first. One with work of its own (it may be saving) may go on until it waits for
    others, for at most `timeout` seconds. One that has waited for `timeout` seconds makes every
    process report its stacks and end. The store is that of torch.distributed.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        # A clone has its own connection: the original is locked while somebody waits for a key.
        self._store = PrefixStore(f"rlhf_pg/failure/{next(NUMBERS)}", store.clone())
        self._rank, self._world, self._timeout = rank, world, timeout
        self._wait: tuple[str, float] | None = None  # where the main thread waits, and since when
        self._heard: Failure | None = None
        self._launcher = os.getppid()
        self._stop = threading.Event()
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # for stacks when NCCL's watchdog aborts
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; from now on this process is not watched."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(GRACE)
            self._meet("ends", range(1, self._world) if self._rank == 0 else ())

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Mark a block that returns only when other processes have come as far."""
        outer = self._wait
        self._wait = place, time.monotonic()
        try:
            yield
        finally:
            self._wait = outer and (outer[0], time.monotonic())

    def tell(self, error: BaseException) -> None:
        """Tell the others why this process leaves, and wait until they know.

        An error that follows from another process's failure gets that failure as a note.
        """
        if self._stop.is_set():  # it was already told where it was raised
            return
        self._stop.set()
        self._thread.join(GRACE)
        what = f"failed: {type(error).__name__}: {error}"
        if not self._heard and any(words in str(error) for words in LOST):
            error.add_note(GONE)
        trace = "".join(traceback.format_exception(error))
        first = self._heard or self._publish(f"{what}\n{trace}")
        # Print it now: once the first process has left, a launcher may kill the others any moment.
        self._say(what)
        if first.rank != self._rank and isinstance(error, RuntimeError):
            error.add_note(f"Before that, {first.text.splitlines()[0]}")
        if not self._heard:
            self._answer()

    def _publish(self, what: str, hung: bool = False) -> Failure:
        """Write a failure of this process if it is the first, and return the first."""
        text = f"rank {self._rank} ({socket.gethostname()}) {what[:LONGEST]}"
        mine = Failure(self._rank, text, hung)
        try:
            return Failure(*json.loads(self._store.compare_set("first", "", json.dumps(mine))))
        except RuntimeError:  # the store is gone, so nobody can be told
            return mine

    def _answer(self) -> None:
        """Confirm that this process knows, and wait for the others, whose connections it breaks."""
        if silent := self._meet("knows", [r for r in range(self._world) if r != self._rank]):
            self._say(f"no answer from ranks {silent}: gone, or frozen")
        if self._rank == 0:
            time.sleep(POLL)  # others may be counting answers

    def _meet(self, sign: str, others: Sequence[int]) -> list[int]:
        """Give a sign and wait for that of the others; return those that gave none.

        Rank 0 or its launcher holds the store, and must not go while others read in it.
        """
        late, deadline = list(others), time.monotonic() + GRACE
        with suppress(RuntimeError):
            self._store.set(f"{sign}/{self._rank}", "")
            while late and time.monotonic() < deadline:
                time.sleep(POLL / 20)
                late = [r for r in late if not self._store.check([f"{sign}/{r}"])]
        return late

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            try:
                wait = self._wait
                if wait is not None and time.monotonic() - wait[1] > self._timeout:
                    text = f"has waited {self._timeout} s in {wait[0]} (ddp_timeout): "
                    self._publish(text + "another process hangs", hung=True)
                if self._store.check(["first"]):
                    self._heard = failure = Failure(*json.loads(self._store.get("first")))
                    if failure.hung:
                        self._leave(failure.text)
                    self._say(failure.text)
                    self._meet("knows", ())
                    self._end_when_waiting("cannot go on without the others", self._timeout)
            except RuntimeError as error:
                text = f"the store of all processes is gone, with rank 0 or its launcher: {error}"
                orphaned = os.getppid() != self._launcher  # all then save and end by themselves
                grace = PARTING if orphaned else GRACE
                self._end_when_waiting(text, patience=float("inf"), grace=grace)

    def _end_when_waiting(self, why: str, patience: float, grace: float = GRACE) -> None:
        """End the process once it waits for others; return if it ends by itself."""
        heard = time.monotonic()
        while not self._stop.wait(POLL):
            wait, now = self._wait, time.monotonic()
            has_waited = wait is not None and now - max(wait[1], heard) > grace
            if has_waited or now - heard > patience:
                self._leave(why)

    def _leave(self, why: str) -> NoReturn:
        """End the process, whose main thread cannot be interrupted."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = "".join(traceback.format_stack(frame)).rstrip()
                why += f"\nStack of {names.get(ident, ident)}:\n{stack}"
        self._say(why)
        self._answer()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def _say(self, text: str) -> None:
        """Write to stderr in one piece, since the terminal is shared."""
        with suppress(OSError, ValueError):  # of a full disk, or a closed stream
            sys.stderr.write(f"[rank {self._rank}] {text.rstrip()}\n")
            sys.stderr.flush()


def waits(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of `Runtime` that returns only when other processes have come as far."""

    @functools.wraps(verb)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with nullcontext() if owner.watch is None else owner.watch.waiting(verb.__name__):
            return verb(*args, **kwargs)

    return watched


def broadcasts_failure(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of an object with a `runtime`, to end other processes when it raises."""

    @functools.wraps(method)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            watch = getattr(getattr(args[0], "runtime", None), "watch", None)
            if watch is not None and not isinstance(error, Terminated):
                watch.tell(error)
            raise

    return telling
