"""Worker processes that can be killed: for users' reward functions, slow mathematics, rollouts."""

import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.boundary.quoted import tell
from rlhf_pg.boundary.user_code import CallFailed
from rlhf_pg.boundary.user_modules import import_file, loaded_files

START = 300.0  # timeout in seconds for a worker to start, and to import a function
PR_SET_PDEATHSIG = 1
# A function must not use the trainer's GPU or its cores.
WORKER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
# Not multiprocessing's spawn, which imports the training script, perhaps without a main guard.
SCRIPT = "import sys; sys.path[:] = sys.argv[3:]; from rlhf_pg.boundary.pool import work; work()"
Ready = Callable[[], Any]
# The future, the user files that a call needs with its pickled function and arguments, its timeout.
Task = tuple["Future[Any]", tuple[list[str], bytes], float | None]


class NotStarted(CallFailed):
    """No worker process could be started for a call."""


class Pool:
    """`count` workers with one call each at a time; one that hangs or crashes is replaced.

    Workers see no GPU, have one thread and `memory` bytes (by default at most half of the machine's
    memory), call `ready` first, and end with the process that made the pool.
    """

    def __init__(self, count: int, memory: int | None = None, ready: Ready = os.getpid) -> None:
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        for _ in range(count):  # without a reference to the pool: it may be collected
            setup = (self._tasks, memory or half, ready)
            threading.Thread(target=_serve, args=setup, daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)

    def schedule(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> "Future[Any]":
        """Call a function in a worker, which imports it by name.

        The future raises CallFailed if the call cannot be sent, fails, takes longer than `timeout`
        seconds or ends its process, and NotStarted if no process starts.
        """
        future: Future[Any] = Future()
        try:
            call = pickle.dumps((function, args))
        except Exception as error:
            reason = f"has arguments that cannot be sent to a worker: {tell(error)}"
            future.set_exception(CallFailed(reason))
            return future
        files = [file for name, file in loaded_files().items() if name.encode() in call]
        self._tasks.put((future, (files, call), timeout))
        return future


def _serve(tasks: "SimpleQueue[Task | None]", memory: int, ready: Ready) -> None:
    """Run tasks in one worker, started for the first task; the body of a thread."""
    worker: subprocess.Popen[bytes] | None = None
    while (task := tasks.get()) is not None:
        future, call, timeout = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if worker is None or worker.poll() is not None:
                worker, pipe = _start(memory, ready)
            pipe.send(call)
            answer, failure = _receive(pipe, timeout)
            if failure is None:
                future.set_result(answer)
            else:
                future.set_exception(CallFailed(failure))
        except Exception as error:  # raised to the caller, not in this thread
            _kill(worker)
            if isinstance(error, EOFError | OSError) and worker is not None:
                code = worker.returncode
                message = f"ended its worker process: exit code {code}"
                if code == -signal.SIGKILL:
                    message += ", as when memory runs out"
                error = CallFailed(message)
            future.set_exception(error)
    _kill(worker)


def _receive(pipe: Connection, timeout: float | None) -> Any:
    """Return the answer and the failure of a call; its timeout begins once it is imported."""
    for limit in (START, timeout):
        if not pipe.poll(limit):
            raise CallFailed.late(limit)
        if (reply := pipe.recv()) is not None:  # None: it is imported
            break
    return reply


def _start(memory: int, ready: Ready) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start a worker, and wait until it is ready."""
    pipe, other = Pipe()
    arguments = [str(other.fileno()), str(memory), *(path or os.getcwd() for path in sys.path)]
    worker = None
    try:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,  # functions must not print to the trainer's stdout
            env=without_launcher() | WORKER_ENVIRONMENT,
            pass_fds=[other.fileno()],
            start_new_session=True,  # no Ctrl-C, and `_kill` reaches its children
        )
        other.close()
        pipe.send(([], pickle.dumps((ready, ()))))
        _, failure = _receive(pipe, START)
    except (CallFailed, EOFError, OSError) as error:
        failure = tell(error)
    if worker is None or failure is not None:
        _kill(worker)
        raise NotStarted(f"cannot be called: a worker process does not start: {failure}")
    return worker, pipe


def _kill(worker: "subprocess.Popen[bytes] | None") -> None:
    if worker is not None:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # its children too
        worker.wait()


def work() -> None:
    """Answer calls from a pipe; the body of a worker."""
    number, memory = map(int, sys.argv[1:3])
    pipe = Connection(number)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # workers are killed first if memory runs out
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    with suppress(EOFError):  # the trainer has ended
        while True:
            files, call = pipe.recv()
            answer = None
            failure = None
            try:
                for file in files:
                    import_file(Path(file))
                function, args = pickle.loads(call)
                pipe.send(None)
                answer = function(*args)
            except CallFailed as error:
                failure = str(error)
            except Exception as error:
                failure = f"raised {tell(error)}"
            pipe.send((answer, failure))
