"""The main loop of a process that runs users' reward functions for the trainer that started it.

The process is started by this file's path, and the file imports only the standard library: the
package and its libraries take seconds and hundreds of megabytes. Requests come pickled from the
trainer. Answers go back as JSON, so that nothing a reward function returns is unpickled. What a
function prints goes to standard error.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

HEADER = struct.Struct("<Q")  # length of the message that follows
LONGEST = 4000  # characters of a text
OWN_COLUMNS = {  # of completions.jsonl
    *("step", "prompt_index", "sample", "prompt", "completion", "advantage", "truncated"),
    *("turns", "error"),
}
PR_SET_PDEATHSIG = 1


class Log:
    """The numbers and columns that a reward function logs in one call.

    Args:
        count: completions of the call.

    Attributes:
        extra: columns for completions.jsonl, one value per completion.
        metrics: numbers for metrics.jsonl, by name.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions of the call.

        Raises:
            ValueError: there is not one value per completion, or the run has a column of that name.
        """
        if column in OWN_COLUMNS or column.startswith("rewards/"):
            raise ValueError(f"log_extra: the run itself has a column {column!r}: rename it")
        values = list(values)
        if len(values) != self.count:
            raise ValueError(
                f"log_extra: column {column!r} has {len(values)} values for {self.count} "
                "completions"
            )
        self.extra[column] = values

    def log_metric(self, name: str, value: float) -> None:
        """Add a number, which is averaged over the calls and processes of a step."""
        self.metrics.setdefault(str(name), []).append(float(value))


def error_text(error: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}"[:LONGEST]


def write(stream: BinaryIO, message: bytes) -> None:
    """Write a message with its length in front."""
    stream.write(HEADER.pack(len(message)) + message)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """Read a message; None if the writer has left."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    message = stream.read(HEADER.unpack(header)[0])
    return message if len(message) == HEADER.unpack(header)[0] else None


# ------------------------------------------------------------------------------------- one call


def answer(functions: Sequence[Callable[..., Any]], request: bytes) -> dict[str, Any]:
    """Call a reward function as a request says.

    Args:
        functions: all that were loaded.
        request: pickled: the number of the function, its arguments, the names of the log functions
            that it takes, and the number of completions.

    Returns:
        `scores` (or `got`, the text of what is no list), `extra` and `metrics`; or `error`, and
        `last` if the process should not go on.
    """
    try:
        number, arguments, logs, count = pickle.loads(request)
        log = Log(count)
        arguments |= {name: getattr(log, name) for name in logs}
        said = _awaited(functions[number](**arguments))
        extra = {name: [_json(value) for value in values] for name, values in log.extra.items()}
        return _scores(said) | {"extra": extra, "metrics": log.metrics}
    except BaseException as error:
        return {"error": error_text(error), "last": isinstance(error, MemoryError)}


def _awaited(said: Any) -> Any:
    if not hasattr(said, "__await__"):
        return said
    import asyncio  # which takes a tenth of a second

    async def result() -> Any:
        return await said

    return asyncio.run(result())


def _scores(said: Any) -> dict[str, Any]:
    said = plain(said)
    if not isinstance(said, list):
        return {"got": repr(said)[:LONGEST]}
    return {"scores": [_score(score) for score in said]}


def _score(score: Any) -> Any:
    steps = plain(score)
    return [_number(step) for step in steps] if isinstance(steps, list) else _number(score)


def _number(score: Any) -> Any:
    """Return a number or None as JSON has it; the text of anything else, in a dict."""
    if score is None:
        return None
    try:
        if not isinstance(score, str):
            return float(score)
    except Exception:
        pass
    return {"shown": repr(score)[:LONGEST]}


def plain(said: Any) -> Any:
    """Convert an array, a tensor or any other sequence to a list; leave all else as it is."""
    said = said.tolist() if hasattr(said, "tolist") else said
    if isinstance(said, Sequence) and not isinstance(said, str | bytes):
        return [said[i] for i in range(len(said))]
    return said


def _json(value: Any) -> Any:
    """Return a value if JSON can hold it, or else its text."""
    try:
        json.dumps(value)
    except Exception:
        return repr(value)[:LONGEST]
    return value


# ---------------------------------------------------------------------------------- the process


def main() -> None:
    """Load the functions that the trainer names, and answer its calls until it leaves."""
    requests, answers = _own_pipes()
    first = read(requests)
    if first is None:
        return
    setup = pickle.loads(first)
    _die_with(setup["trainer"])
    _limit(setup["memory"])
    reply, functions = _loaded(setup)
    write(answers, json.dumps(reply).encode())
    while (request := read(requests)) is not None:
        write(answers, json.dumps(answer(functions, request)).encode())
    os._exit(0)  # without waiting for threads that a function has left behind


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the pipes to the trainer away from functions that read or print."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def _die_with(trainer: int) -> None:
    """End by a signal as soon as the trainer is gone, even within a call (on Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        os._exit(1)


def _limit(memory: int | None) -> None:
    """Bound the memory of the process, and be the first to go when the machine has none left."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if memory is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        memory = min(memory, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))


def _loaded(setup: dict[str, Any]) -> tuple[dict[str, Any], list[Callable[..., Any]]]:
    """Import the functions; return what to tell the trainer, and the functions."""
    sys.path[:] = setup["path"]
    functions: list[Callable[..., Any]] = []
    try:
        for name, file in setup["modules"].items():
            _import_file(name, file)
        for reference in setup["functions"]:
            functions.append(pickle.loads(reference))
    except BaseException as error:
        return {"error": error_text(error), "function": len(functions)}, functions
    return {"ready": True}, functions


def _import_file(name: str, file: str) -> None:
    """Import a user's file under the name that it has in the trainer."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if __name__ == "__main__":
    main()
