"""When a process fails or hangs, the others say so and end.

A process inside a collective hears nothing: no exception reaches Python until the operation
returns. So each has a thread that looks once a second at a key of torch.distributed's own store,
where the first failure is written.
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
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from rlhf_pg.boundary.launcher import launcher

P = ParamSpec("P")
R = TypeVar("R")

POLL = 1.0  # seconds between two looks at the store
MEETING = 2.0  # seconds in which all processes raise what they raise together
PARTING = 120.0  # seconds that one may wait for others who save, when the launcher is gone
GRACE = 5.0  # seconds that others get to answer, or to end by an error of their own
LONGEST = 20_000  # characters of a failure
NUMBERS = itertools.count()  # of watches: the same in every process

HOLDS_STORE = "TORCHELASTIC_RUN_ID"  # set by a launcher in which the store of all processes is

# What gloo says when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
GONE = "The connection to another process was lost: it was killed (out of memory?), or has left."

# What a stream raises that is not there, is closed, or goes to a disk that is full.
UNHEARD = (AttributeError, ValueError, OSError)


class Terminated(SystemExit):
    """All processes leave together, after a signal: that is no failure of one of them."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)  # as a shell has it


class Failure(NamedTuple):
    """What is in the store: the first process that failed, and why."""

    rank: int
    text: str
    hung: bool = False


class Watch:
    """Tells the others of a failure here, and ends this process after a failure elsewhere.

    A process that waits for others ends `GRACE` seconds after it heard of the failure, unless an
    error ends it before. One that is at work of its own (it may be saving, or closing its trackers)
    is left to it until it waits for others, or for `timeout` seconds. One that has waited for
    `timeout` seconds makes every process report its stacks and end.

    Args:
        store: the `torch.distributed.Store` of all processes.
        timeout: in seconds.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        # A clone has its own connection: the original is locked while somebody waits for a key.
        self._store = PrefixStore(f"rlhf_pg/failure/{next(NUMBERS)}", store.clone())
        self._rank, self._world, self._timeout = rank, world, timeout
        self._wait: tuple[str, float] | None = None  # in what the main thread waits, since when
        self._heard: Failure | None = None
        self._departures = itertools.count()
        self._launcher = launcher()
        self._stop = threading.Event()
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # the watchdog of NCCL aborts the process
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: from here on this process is left alone."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(GRACE)
            self._meet("ends", range(1, self._world) if self._rank == 0 else ())

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Around whatever returns only when other processes have come as far."""
        outer = self._wait
        self._wait = place, time.monotonic()
        try:
            yield
        finally:
            self._wait = outer and (outer[0], time.monotonic())

    def tell(self, error: BaseException) -> None:
        """Tell the others why this process leaves, and wait until they know.

        An error that only follows from the failure of another gets that one as a note.
        """
        if self._stop.is_set():  # it has been told where it was raised
            return
        self._stop.set()
        self._thread.join(GRACE)
        lost = any(words in str(error) for words in LOST)
        what = f"failed: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        first = self._heard or self._publish(f"{what}\n{trace}{GONE if lost else ''}")
        # Said now: once the first process has left, a launcher may kill the others at any moment.
        self._say(what)
        if first.rank != self._rank and isinstance(error, RuntimeError):
            error.add_note(f"Before that, {first.text.splitlines()[0]}")
        elif lost:
            error.add_note(GONE)
        if not self._heard:
            self._answer()

    def leave_together(self, place: str) -> bool:
        """Whether every process is on its way out, from the same place; the same answer in all.

        None is then in a collective, or comes to one: they may take another together.
        """
        departure = f"leaves/{next(self._departures)}"
        keys = [f"{departure}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + MEETING
        try:
            self._store.set(keys[self._rank], place)
            while not (all_here := self._store.check(keys)) and time.monotonic() < deadline:
                time.sleep(POLL / 20)
            places = {self._store.get(key) for key in keys} if all_here else set()
            # One of them decides for all: others may have lost patience at the same moment.
            verdict = self._store.compare_set(departure, "", "yes" if len(places) == 1 else "no")
        except RuntimeError:  # the store is gone
            return False
        return bool(verdict == b"yes")

    def _publish(self, what: str, hung: bool = False) -> Failure:
        """Write a failure of this process, if it is the first; returns the first."""
        text = f"rank {self._rank} ({socket.gethostname()}) {what[:LONGEST]}"
        mine = Failure(self._rank, text, hung)
        try:
            return Failure(*json.loads(self._store.compare_set("first", "", json.dumps(mine))))
        except RuntimeError:  # the store is gone, and nobody left to be told
            return mine

    def _answer(self) -> None:
        """Say that this process knows, and wait for the others, whose connections it will break."""
        silent = self._meet("knows", [r for r in range(self._world) if r != self._rank])
        if silent:
            self._say(f"no answer from ranks {silent}: gone, or frozen")
        if self._rank == 0:
            time.sleep(POLL)  # others may be counting answers

    def _meet(self, sign: str, others: Sequence[int]) -> Sequence[int]:
        """Give a sign, and wait for that of others; returns those that gave none.

        Rank 0, or its launcher, holds the store: it must not go while others read in it.
        """
        deadline = time.monotonic() + GRACE
        keys = [f"{sign}/{rank}" for rank in others]
        with suppress(RuntimeError):
            self._store.set(f"{sign}/{self._rank}", "")
            while keys and not self._store.check(keys):
                if time.monotonic() > deadline:
                    return [r for r in others if not self._store.check([f"{sign}/{r}"])]
                time.sleep(POLL / 20)
            return []
        return others

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            try:
                if self._waited() > self._timeout:
                    self._publish(self._overdue(), hung=True)
                if self._store.check(["first"]):
                    self._end(Failure(*json.loads(self._store.get("first"))))
            except RuntimeError as error:
                text = f"the store of all processes is gone, with rank 0 or its launcher: {error}"
                orphaned = os.getppid() != self._launcher  # then all save and end by themselves
                grace = PARTING if orphaned else GRACE
                self._end_when_waiting(text, patience=float("inf"), grace=grace)

    def _waited(self, since: float = 0.0) -> float:
        """Seconds that the main thread has waited for others, of those after `since`."""
        wait = self._wait
        return 0.0 if wait is None else time.monotonic() - max(wait[1], since)

    def _overdue(self) -> str:
        place = self._wait[0] if self._wait else ""
        return f"has waited {self._timeout} s in {place} (ddp_timeout): another process hangs"

    def _end(self, failure: Failure) -> None:
        self._heard = failure
        if failure.hung:
            self._leave(failure.text)
        self._say(failure.text)
        self._meet("knows", ())
        self._end_when_waiting("cannot go on without the others", self._timeout)

    def _end_when_waiting(self, why: str, patience: float, grace: float = GRACE) -> None:
        """Returns when the process ends by itself."""
        heard = time.monotonic()
        while not self._stop.wait(POLL):
            if self._waited(heard) > grace or time.monotonic() - heard > patience:
                self._leave(why)

    def _leave(self, why: str) -> NoReturn:
        """End the process, although its main thread cannot be interrupted."""
        self._say(f"{why}\n{stacks()}")
        self._answer()
        with suppress(*UNHEARD):
            sys.stdout.flush()
        os._exit(1)

    def _say(self, text: str) -> None:
        """In one piece, since processes share the terminal; if nobody can hear it, not at all."""
        with suppress(*UNHEARD):
            sys.stderr.write(f"[rank {self._rank}] {text.rstrip()}\n")
            sys.stderr.flush()


@contextmanager
def meeting() -> Iterator[None]:
    """Around the first meeting of all processes, in a store that their launcher may hold: without
    it they would wait for `ddp_timeout`. Who has begun nothing has nothing to save, and ends.
    """
    met = threading.Event()
    if HOLDS_STORE in os.environ:
        threading.Thread(target=_end_with, args=(launcher(), met), daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _end_with(parent: int, met: threading.Event) -> None:
    while not met.wait(POLL):
        if os.getppid() != parent:
            with suppress(*UNHEARD):
                sys.stderr.write("this process ends: its launcher is gone, and nothing had begun\n")
                sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)


def stacks() -> str:
    """Where every thread of this process is, but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Stack of {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def waits(verb: Callable[P, R]) -> Callable[P, R]:
    """For a method of `Runtime` that returns only when other processes have come as far."""

    @functools.wraps(verb)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        runtime: Any = args[0]
        if runtime.watch is None:
            return verb(*args, **kwargs)
        with runtime.watch.waiting(verb.__name__):
            return verb(*args, **kwargs)

    return watched


def broadcasts_failure(method: Callable[P, R]) -> Callable[P, R]:
    """For a method of an object with a `runtime`: when it raises, the other processes end too."""

    @functools.wraps(method)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            runtime = getattr(args[0], "runtime", None)
            together = isinstance(error, Terminated)
            if runtime is not None and runtime.watch is not None and not together:
                runtime.watch.tell(error)
            raise

    return telling
