"""Worker processes that can be killed: users' reward functions, and mathematics that takes ages."""

import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_modules import import_file, loaded
from rlhf_pg.rewards.functions import Answer, CallFailed, Source, call, late

START = 300.0  # seconds for a worker to be ready, and to import a function
END = 5.0  # seconds for a process whose pipe has closed to end
PR_SET_PDEATHSIG = 1
# A function must not take the trainer's GPU or its cores.
ALONE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Not multiprocessing's spawn, which imports the script that trains and may have no main guard.
SCRIPT = "import sys; sys.path[:] = {path!r}; from rlhf_pg.rewards.pool import work; work({pipe})"
Ready = Callable[[], None] | None
Task = tuple["Future[Any]", bytes, float | None]


class NotStarted(RuntimeError):
    """An error of a worker that is not ready for its first call."""


class Pool:
    """`count` workers, each one call at a time; one that hangs or crashes is replaced.

    Workers see no GPU, have one thread each and half of the machine's memory at most, and end with
    the process that made the pool.

    Args:
        memory: bytes, in place of half of the machine's.
        ready: called in each new worker.
    """

    def __init__(self, count: int, memory: int | None = None, ready: Ready = None) -> None:
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        for _ in range(count):  # they do not know the pool, which may be collected
            setup = (self._tasks, memory or half, ready)
            threading.Thread(target=_serve, args=setup, daemon=True).start()
        weakref.finalize(self, _end, self._tasks, count)

    def schedule(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> "Future[Any]":
        """Have a function of this package called in a worker.

        Raises:
            CallFailed: from the future: the call failed, took longer than `timeout` seconds, or
                ended its process.
            NotStarted: from the future: there is no process for it.
        """
        future: Future[Any] = Future()
        self._tasks.put((future, pickle.dumps((function, args)), timeout))
        return future

    def call(
        self, source: Source, arguments: Mapping[str, Any], count: int, timeout: float | None
    ) -> "Future[Answer]":
        """Begin a call of a reward function on `count` completions.

        Raises:
            CallFailed: an argument cannot be sent.
        """
        if "trainer_state" in arguments:  # whose class takes seconds to import
            state = SimpleNamespace(**vars(arguments["trainer_state"]))
            arguments = {**arguments, "trainer_state": state}
        try:
            sent = pickle.dumps((source, arguments, count))
        except Exception as error:
            raise CallFailed(f"was given what cannot be sent to a worker: {told(error)}") from error
        return self.schedule(_call, [*loaded().values()], sent, timeout=timeout)

    def check(self, source: Source) -> None:
        """Make sure that a function can be called in a worker.

        Raises:
            ValueError: it cannot be sent there or imported there.
        """
        try:
            sent = pickle.dumps(source)
            if b"__main__" in sent:
                raise TypeError("it is part of the script itself")
            self.schedule(_check, [*loaded().values()], sent, timeout=START).result()
        except Exception as error:
            raise ValueError(
                f"reward function {source.name} cannot be sent to a worker or imported there "
                f"({told(error)}): define it at the top level of a file of its own, or leave out "
                "reward_workers"
            ) from error


def _serve(tasks: "SimpleQueue[Task | None]", memory: int, ready: Ready) -> None:
    """Do tasks with one worker, which is started when there is one; the body of a thread."""
    worker: subprocess.Popen[bytes] | None = None
    while (task := tasks.get()) is not None:
        future, sent, timeout = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if worker is None or worker.poll() is not None:
                worker, pipe = _started(memory, ready)
            pipe.send_bytes(sent)
            if not pipe.poll(timeout):
                raise CallFailed(late(timeout))
            answer, failure = pickle.loads(pipe.recv_bytes())
            if failure is None:
                future.set_result(answer)
            else:
                future.set_exception(CallFailed(failure))
        except Exception as error:  # it belongs to the caller, not to this thread
            code = None
            if isinstance(error, EOFError | OSError) and worker is not None:
                with suppress(subprocess.TimeoutExpired):
                    code = worker.wait(END)
                killed = ", as when memory runs out" * (code == -signal.SIGKILL)
                error = CallFailed(f"ended its worker process: exit code {code}{killed}")
            if worker is not None:
                _kill(worker)
            future.set_exception(error)
    if worker is not None:
        _kill(worker)


def _started(memory: int, ready: Ready) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start a worker, and wait until it is ready."""
    pipe, other = Pipe()
    script = SCRIPT.format(path=[path or os.getcwd() for path in sys.path], pipe=other.fileno())
    try:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what functions print is not the trainer's output
            env=without_launcher() | ALONE,
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is for the trainer, and children die with it
        )
    except OSError as error:
        raise NotStarted(f"a worker process cannot be started: {told(error)}") from error
    other.close()
    try:
        pipe.send_bytes(pickle.dumps((os.getpid(), memory, ready)))
        failure = pickle.loads(pipe.recv_bytes()) if pipe.poll(START) else f"not in {START:g} s"
    except (EOFError, OSError) as error:
        failure = told(error)
    if failure is not None:
        _kill(worker)
        raise NotStarted(f"a worker process does not start: {failure}")
    return worker, pipe


def _kill(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker, and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def work(number: int) -> None:
    """Answer calls that come through a pipe; the body of a worker.

    Args:
        number: of the pipe's file.
    """
    pipe = Connection(number)
    trainer, memory, ready = pickle.loads(pipe.recv_bytes())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        return
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should the machine's memory end, workers go first
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    failure: str | None = None
    try:
        if ready is not None:
            ready()
    except Exception as error:
        failure = told(error)
    pipe.send_bytes(pickle.dumps(failure))
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        answer, failure = None, None
        try:
            answer = function(*args)
        except CallFailed as error:
            failure = str(error)
        except Exception as error:
            failure = f"raised {told(error)}"
        pipe.send_bytes(pickle.dumps((answer, failure)))


def _end(tasks: "SimpleQueue[Task | None]", count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _load(files: Sequence[str], sent: bytes) -> Any:
    for file in files:
        import_file(Path(file))
    return pickle.loads(sent)


def _check(files: Sequence[str], sent: bytes) -> None:
    _load(files, sent)


def _call(files: Sequence[str], sent: bytes) -> Answer:
    return call(*_load(files, sent))
