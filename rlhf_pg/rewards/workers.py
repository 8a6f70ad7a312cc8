"""Processes that run users' reward functions and can be killed: a pool, and one worker of it."""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, Any

from rlhf_pg.boundary import worker as process
from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.boundary.user_modules import loaded
from rlhf_pg.rewards.answers import CallFailed

START = 300.0  # seconds for a worker to import the functions
END = 5.0  # seconds for a process whose pipe has closed to end
CHUNK = 65536  # bytes
LONGEST = 2**30  # bytes of an answer
# A function must not take the trainer's GPU or its cores.
ALONE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)

Job = Callable[["Worker"], Any]
Task = tuple["Future[Any]", Job]


class _Gone(Exception):
    """The process has closed its pipe."""


class WorkerPool:
    """Spawned processes that call reward functions, each one call at a time.

    A worker that hangs, crashes or answers nonsense is killed with all processes that it has
    started, and the next call starts another. Workers see no GPU, have one thread each and a limit
    on their memory, and end with the process that made the pool.

    Args:
        functions: by name; they are sent by reference, so each must be importable.
        count: number of processes.
        timeout: seconds for a call; None waits for ever.
        memory: bytes of data that a worker may have; None for half of the machine's memory.

    Raises:
        ValueError: a function cannot be sent to a worker, or not be imported there.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        count: int,
        timeout: float | None = None,
        memory: int | None = None,
    ) -> None:
        setup = {
            "trainer": os.getpid(),
            "path": [path or os.getcwd() for path in sys.path],
            "memory": half_of_memory() if memory is None else memory,
            "modules": loaded(),
            "functions": [_reference(name, function) for name, function in functions.items()],
        }
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.workers = [Worker(setup, list(functions), timeout) for _ in range(count)]
        # The threads do not know the pool, which may therefore be collected.
        self.close = weakref.finalize(self, _close, self._tasks, self.workers)
        started = [Future[Any]() for _ in self.workers]
        for worker, future in zip(self.workers, started, strict=True):
            arguments = (worker, self._tasks, future)
            threading.Thread(target=_serve, args=arguments, daemon=True).start()
        try:
            for future in started:
                future.result()
        except CallFailed as error:
            self.close()
            raise ValueError(str(error)) from error

    def submit(self, job: Callable[["Worker"], Any]) -> "Future[Any]":
        """Have a job done with the next worker that is free."""
        future: Future[Any] = Future()
        self._tasks.put((future, job))
        return future


def half_of_memory() -> int:
    """Return half of the bytes of the machine's memory: a worker with more has run away."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _reference(name: str, function: Callable[..., Any]) -> bytes:
    """Pickle a function by reference.

    Raises:
        ValueError: no other process could import it.
    """
    remedy = "define it at the top level of a file of its own and import it, or leave out"
    try:
        reference = pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"reward function {name} cannot be sent to a worker ({told(error)}): {remedy} "
            "reward_workers"
        ) from error
    if b"__main__" in reference:
        raise ValueError(
            f"reward function {name} is part of the script itself, which a worker must not run: "
            f"{remedy} reward_workers"
        )
    return reference


def _serve(worker: "Worker", tasks: "SimpleQueue[Task | None]", started: "Future[Any]") -> None:
    """Do jobs with one worker; the body of a thread."""
    _settle(started, worker.start)
    while (task := tasks.get()) is not None:
        future, job = task
        if future.set_running_or_notify_cancel():
            _settle(future, partial(job, worker))
        del future, job, task  # or an idle thread would keep what it has computed
    worker.stop()


def _settle(future: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # it belongs to the caller, not to this thread
        future.set_exception(error)


def _close(tasks: "SimpleQueue[Task | None]", workers: Sequence["Worker"]) -> None:
    for worker in workers:
        tasks.put(None)
        worker.closed = True
        worker.kill()


class Worker:
    """One process, which is started again after it had to be killed.

    Args:
        setup: what the process needs to begin.
        names: names of the functions, for errors.
        timeout: seconds for a call.
    """

    def __init__(self, setup: dict[str, Any], names: Sequence[str], timeout: float | None) -> None:
        self.setup, self.names, self.timeout = setup, names, timeout
        self.closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and have it import the functions.

        Raises:
            CallFailed: it could not.
        """
        if self.closed:
            raise CallFailed("its worker has been closed")
        self._process = subprocess.Popen(
            [sys.executable, "-P", process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the trainer, and children die with it
        )
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
        reply = self._exchange(pickle.dumps(self.setup), START, "was not ready for its first call")
        if "ready" not in reply:
            self.stop()
            name = self.names[min(reply.get("function", 0), len(self.names) - 1)]
            raise CallFailed(
                f"reward function {name} cannot be imported in a worker "
                f"({quoted(str(reply.get('error')))}): a worker has the trainer's sys.path, and no "
                "CUDA"
            )

    def call(
        self, number: int, arguments: Mapping[str, Any], logs: Sequence[str], count: int
    ) -> dict[str, Any]:
        """Call a function on `count` completions, and return its answer.

        Raises:
            CallFailed: there is none.
        """
        try:
            request = pickle.dumps((number, dict(arguments), tuple(logs), count))
        except Exception as error:
            raise CallFailed(f"was given what cannot be sent to a worker: {told(error)}") from error
        if self._process is None or self._process.poll() is not None:
            self.start()
        limit = "" if self.timeout is None else f" within {self.timeout:g} s (reward_timeout)"
        reply = self._exchange(request, self.timeout, f"did not return{limit}")
        if "error" in reply:
            if reply.get("last"):
                self.stop()
            raise CallFailed(f"raised {quoted(str(reply['error']))}")
        return reply

    def kill(self) -> None:
        """Kill the process, and whatever it has started."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process and close its pipes."""
        if self._process is None:
            return
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END)
        for pipe in self._pipes():
            with suppress(OSError):
                pipe.close()
        self._process = None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _exchange(self, request: bytes, limit: float | None, late: str) -> dict[str, Any]:
        """Send a request and return the answer; a process that gives none is stopped."""
        deadline = None if limit is None else time.monotonic() + limit
        try:
            self._send(process.HEADER.pack(len(request)) + request, deadline)
            size = process.HEADER.unpack(self._receive(process.HEADER.size, deadline))[0]
            reply = json.loads(self._receive(min(size, LONGEST), deadline))
            if not isinstance(reply, dict):
                raise ValueError
        except TimeoutError as error:
            self.stop()
            raise CallFailed(late) from error
        except (_Gone, OSError) as error:
            how = self._how_it_ended()
            self.stop()
            raise CallFailed(f"ended its worker process: {how}") from error
        except ValueError as error:
            self.stop()
            raise CallFailed("sent through its worker what is no answer") from error
        return reply

    def _send(self, message: bytes, deadline: float | None) -> None:
        pipe, left = self._pipes()[0].fileno(), memoryview(message)
        while len(left):
            _wait(pipe, select.POLLOUT, deadline)
            left = left[os.write(pipe, left[:CHUNK]) :]

    def _receive(self, count: int, deadline: float | None) -> bytes:
        pipe, parts = self._pipes()[1].fileno(), bytearray()
        while len(parts) < count:
            _wait(pipe, select.POLLIN, deadline)
            part = os.read(pipe, min(CHUNK, count - len(parts)))
            if not part:
                raise _Gone
            parts += part
        return bytes(parts)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(END)
        except subprocess.TimeoutExpired:
            return "its pipe was closed"
        if code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # most real-time signals have no name
            name = f"signal {-code}"
        return f"{name}, as when memory runs out" if name == "SIGKILL" else name


def _wait(pipe: int, event: int, deadline: float | None) -> None:
    """Wait until a pipe can be read or written; `select` itself refuses high numbers.

    Raises:
        TimeoutError: the time is over.
    """
    poll = select.poll()
    poll.register(pipe, event)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(left):
        raise TimeoutError


def _environment() -> dict[str, str]:
    return without_launcher() | ALONE | ONE_THREAD
