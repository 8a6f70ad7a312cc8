"""The end of a run on all processes: by a signal, or because one process has failed or hangs.

These signals end a run after the current step: SIGTERM, which schedulers send before they reclaim a
machine; SIGHUP, from a closed terminal; and SIGINT (Ctrl-C).

A process inside a collective does not notice another's failure: no exception reaches Python until
the operation returns. So each process has a thread that once a second reads a key of
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
POLL = 1.0  # seconds between reads of the store, and between checks of the parent process
SAME = 2.0  # a second signal within these seconds is the same one, passed on by a launcher
TOLD = b"\nSIGINT: the step is finished and saved first; another Ctrl-C ends the run at once\n"

PARTING = 120.0  # seconds to wait for other processes to save, once the launcher is gone
GRACE = 5.0  # seconds for other processes to answer, or to end by their own error
LONGEST = 20_000  # most characters of a failure
NUMBERS = itertools.count()  # numbers of the watches, the same in every process

# Messages of gloo when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
GONE = "The connection to another process was lost: it was killed (out of memory?), or has left."


class Terminated(SystemExit):
    """The exit of all processes together after a signal, which is not a failure."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)  # the convention of shells


class Termination:
    """Whether a run has to end, because a signal has come to any process."""

    def __init__(self, runtime: Any) -> None:  # a `Runtime`; its file imports this one
        self._runtime = runtime
        self.stopping = False
        self._stop = False
        self.asked: tuple[int, float] | None = None  # the first signal, and when it came

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals inside the block: the first is noted, and a later one ends the process.

        Outside the main thread, which alone can handle them, signals are not handled. A signal that
        was ignored (as under nohup) stays ignored.
        """
        self.stopping = False
        self._stop = False
        self.asked = None
        in_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT] if in_main else []
        handlers = {number: signal.getsignal(number) for number in numbers}
        # None: a handler outside Python, which could not be restored.
        theirs = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        ended = threading.Event()
        self._launched = any(name in os.environ for name in LAUNCHED)
        try:
            for number in theirs:
                signal.signal(number, self._note)
            if self._launched:
                threading.Thread(
                    target=self._watch_parent,
                    args=(os.getppid(), ended),
                    daemon=True,
                ).start()
            yield
        finally:
            ended.set()
            for number, old in theirs.items():
                signal.signal(number, old)

    def _watch_parent(self, parent: int, ended: threading.Event) -> None:
        """Treat the loss of the launcher, which would orphan this process, as a SIGTERM."""
        while not ended.wait(POLL):
            if os.getppid() != parent:
                self.asked = self.asked or (signal.SIGTERM, time.monotonic())
                return

    def _note(self, number: int, _: Any) -> None:
        # Only note it, since the main thread is interrupted at any point, for example in a write.
        now = time.monotonic()
        if self.asked is None:
            self.asked = number, now
            if number == signal.SIGINT and self._runtime.is_main:
                with suppress(OSError):  # a closed terminal
                    os.write(2, TOLD)
            return
        # A process without a launcher is the only one to get Ctrl-C; a notebook survives it.
        if number == signal.SIGINT and self._runtime.world == 1 and not self._launched:
            raise KeyboardInterrupt
        if now > self.asked[1] + SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop(self) -> None:
        """End the run on all processes after the step, as if it were the last."""
        self._stop = True

    def agree(self) -> int:
        """Return the largest signal that has come to any process, or 0; collective.

        It also sets `stopping`, the same on all processes, if the run has to end.
        """
        number = self.asked[0] if self.asked else 0
        answers = self._runtime.gather_objects((number, self._stop))
        numbers, stops = zip(*answers, strict=True)
        self.stopping = any(numbers) or any(stops)
        return int(max(numbers))


def _restore_signals() -> None:
    """Let signals end a fork (of a reward function, say), even one that never returns to Python."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if getattr(signal.getsignal(number), "__func__", None) is Termination._note:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_signals)


class Failure(NamedTuple):
    """The first failure, as written to the store."""

    rank: int
    text: str
    hung: bool = False


class Watch:
    """Tells other processes of a failure here, and ends this process after a failure elsewhere.

    A process that waits for others ends `GRACE` seconds after it heard of the failure, unless an
    error ends it first. A busy process (it may be saving) may continue until it waits for others,
    for at most `timeout` seconds. A process that has waited so long, or as `hurried` says, makes
    every process report its stacks and end. The store is torch.distributed's.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        # A clone has its own connection: the original is locked while a thread waits for a key.
        self._store = PrefixStore(f"rlhf_pg/failure/{next(NUMBERS)}", store.clone())
        self._rank = rank
        self._world = world
        self.patience = timeout, "ddp_timeout"  # seconds to wait for others, and why so many
        self._wait: tuple[str, float] | None = None  # the main thread's collective and start time
        self._heard: Failure | None = None
        self._launcher = os.getppid()
        self._stop = threading.Event()
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # for stacks when NCCL's watchdog aborts
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; this process is then not watched any more."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(GRACE)
            self._meet("ends", range(1, self._world) if self._rank == 0 else ())

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Mark a block that returns only when other processes reach it."""
        outer = self._wait
        self._wait = operation, time.monotonic()
        try:
            yield
        finally:
            self._wait = outer and (outer[0], time.monotonic())

    @contextmanager
    def hurried(self, why: str, seconds: float) -> Iterator[None]:
        """In a block, wait for other processes only these seconds, and report `why` if they end."""
        before = self.patience
        self.patience = seconds, why
        try:
            yield
        finally:
            self.patience = before

    def tell(self, error: BaseException) -> None:
        """Tell the others why this process ends, and wait for their answers.

        If another process failed first, its failure is added to the error as a note.
        """
        if self._stop.is_set():  # already told
            return
        self._stop.set()
        self._thread.join(GRACE)
        what = f"failed: {type(error).__name__}: {error}"
        if not self._heard and any(words in str(error) for words in LOST):
            error.add_note(GONE)
        trace = "".join(traceback.format_exception(error))
        first = self._heard or self._publish(f"{what}\n{trace}")
        # Print it now: once the first process has ended, a launcher may kill the others.
        self._say(what)
        if first.rank != self._rank and isinstance(error, RuntimeError):
            error.add_note(f"Before that, {first.text.splitlines()[0]}")
        if not self._heard:
            self._answer()

    def _publish(self, what: str, hung: bool = False) -> Failure:
        """Write a failure of this process unless there is one, and return the first."""
        text = f"rank {self._rank} ({socket.gethostname()}) {what[:LONGEST]}"
        mine = Failure(self._rank, text, hung)
        try:
            return Failure(*json.loads(self._store.compare_set("first", "", json.dumps(mine))))
        except RuntimeError:  # the store is gone
            return mine

    def _answer(self) -> None:
        """Confirm the failure, and wait for the others before breaking their connections."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        silent = self._meet("knows", others)
        if silent:
            self._say(f"no answer from ranks {silent}: gone, or frozen")
        if self._rank == 0:
            time.sleep(POLL)  # the others may still count answers

    def _meet(self, sign: str, others: Sequence[int]) -> list[int]:
        """Give a sign, wait for the same from `others`, and return those that did not give it.

        Rank 0 or its launcher holds the store, and must not end while others read it.
        """
        late = list(others)
        deadline = time.monotonic() + GRACE
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
                patience, why = self.patience
                if wait is not None and time.monotonic() - wait[1] > patience:
                    text = f"has waited {patience} s in {wait[0]} ({why}): "
                    self._publish(text + "another process hangs", hung=True)
                if self._store.check(["first"]):
                    self._heard = failure = Failure(*json.loads(self._store.get("first")))
                    if failure.hung:
                        self._leave(failure.text)
                    self._say(failure.text)
                    self._meet("knows", ())
                    self._end_when_waiting("cannot go on without the others", patience)
            except RuntimeError as error:
                text = f"the store of all processes is gone, with rank 0 or its launcher: {error}"
                orphaned = os.getppid() != self._launcher  # then all save and end on their own
                grace = PARTING if orphaned else GRACE
                self._end_when_waiting(text, patience=float("inf"), grace=grace)

    def _end_when_waiting(self, why: str, patience: float, grace: float = GRACE) -> None:
        """End the process once it waits for others; return if it ends on its own."""
        heard = time.monotonic()
        while not self._stop.wait(POLL):
            wait = self._wait
            now = time.monotonic()
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
        with suppress(OSError, ValueError):  # a full disk, or a closed stream
            sys.stderr.write(f"[rank {self._rank}] {text.rstrip()}\n")
            sys.stderr.flush()


def waits(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of `Runtime` that returns only when other processes call it too."""

    @functools.wraps(verb)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with nullcontext() if owner.watch is None else owner.watch.waiting(verb.__name__):
            return verb(*args, **kwargs)

    return watched


def broadcasts_failure(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of an object with a `runtime` to end other processes if it raises."""

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
