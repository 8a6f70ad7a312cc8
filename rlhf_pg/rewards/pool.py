"""Worker processes that can be killed: users' reward functions, and mathematics that takes ages."""

import ctypes
import os
import pickle
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe, context, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.boundary.quoted import told
from rlhf_pg.boundary.user_modules import import_file, loaded
from rlhf_pg.rewards.functions import Answer, CallFailed, Source, call, late

START = 300.0  # seconds for a worker to be ready
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
Ready = Callable[[], None] | None
Task = tuple["Future[Any]", bytes, float | None]


class Worker(context.SpawnProcess):
    """A process that does not import the script that trains, which may have no main guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        whole = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            return {k: data for k, data in whole(name).items() if not k.startswith("init_main")}

        spawn.get_preparation_data = without_main
        try:
            return context.SpawnProcess._Popen(process_obj)
        finally:
            spawn.get_preparation_data = whole


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
            CallFailed: from the future: the call took longer than `timeout` seconds, or ended its
                process. Exceptions of the function itself are raised as they are.
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
            self.schedule(_ready_for, [*loaded().values()], sent).result()
        except Exception as error:
            raise ValueError(
                f"reward function {source.name} cannot be sent to a worker or imported there "
                f"({told(error)}): define it at the top level of a file of its own, or leave out "
                "reward_workers"
            ) from error


def _serve(tasks: "SimpleQueue[Task | None]", memory: int, ready: Ready) -> None:
    """Do tasks with one worker, which is started when there is one; the body of a thread."""
    worker: Worker | None = None
    while (task := tasks.get()) is not None:
        future, sent, timeout = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if worker is None or not worker.is_alive():
                pipe, other = Pipe()
                worker = Worker(target=_work, args=(other, memory, os.getpid(), ready), daemon=True)
                worker.start()
                other.close()
                if not pipe.poll(START):
                    raise CallFailed("did not start its worker process")
                pipe.recv_bytes()
            pipe.send_bytes(sent)
            if not pipe.poll(timeout):
                raise CallFailed(late(timeout))
            answer, error = pickle.loads(pipe.recv_bytes())
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
        except (EOFError, OSError):
            assert worker is not None
            worker.join()
            killed = ", as when memory runs out" * (worker.exitcode == -signal.SIGKILL)
            why = f"ended its worker process: exit code {worker.exitcode}{killed}"
            future.set_exception(CallFailed(why))
        except CallFailed as error:
            assert worker is not None
            worker.kill()
            worker.join()
            future.set_exception(error)
    if worker is not None:
        worker.kill()


def _work(pipe: Connection, memory: int, trainer: int, ready: Ready) -> None:
    """Answer calls; the body of a worker."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the trainer
    os.dup2(2, 1)  # what functions print is not the trainer's output
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should the machine's memory end, workers go first
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    environment = without_launcher() | ALONE
    os.environ.clear()
    os.environ.update(environment)
    if ready is not None:
        ready()
    pipe.send_bytes(b"")
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        answer: Any = None
        failure: Exception | None = None
        try:
            answer = function(*args)
        except Exception as error:
            failure = error if isinstance(error, CallFailed) else RuntimeError(told(error))
        pipe.send_bytes(pickle.dumps((answer, failure)))


def _end(tasks: "SimpleQueue[Task | None]", count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _load(files: Sequence[str], sent: bytes) -> Any:
    for file in files:
        import_file(Path(file))
    return pickle.loads(sent)


def _ready_for(files: Sequence[str], sent: bytes) -> None:
    _load(files, sent)


def _call(files: Sequence[str], sent: bytes) -> Answer:
    return call(*_load(files, sent))
