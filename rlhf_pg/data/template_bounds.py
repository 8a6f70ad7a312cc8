"""Bounds of chat templates, which are anybody's: jinja's sandbox limits `range` alone.

A thread ends a template that takes too long or too much memory, by an exception in the thread that
renders it. A single operation cannot be ended so: those that may take for ever are refused.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from rlhf_pg.boundary.user_code import once_per_process

T = TypeVar("T")

SECONDS = 20.0  # for one chat, which takes milliseconds
MEMORY = 4 * 2**30  # bytes that the process may grow by meanwhile, other threads included
POLL = 0.05
LARGEST = 10**7  # bits of a power, elements of a product


class EndedTemplate(Exception):
    """The chat template was ended."""

    def __str__(self) -> str:
        return f"it was ended after {SECONDS:g} seconds, or {MEMORY:,} bytes more of memory"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, without huge powers and products."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation, unless its result would be huge (OverflowError)."""
        for value, times in ((left, right), (right, left)):
            is_long = isinstance(value, int) if operator == "**" else hasattr(value, "__len__")
            if is_long and isinstance(times, int) and _size(value) * abs(times) > LARGEST:
                raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """Return the bits of a number, or the length of anything else."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value)


chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class TemplateWatch:
    """The thread that ends templates of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy = threading.Event()
        self.began: dict[int, tuple[int, int]] = {}  # by thread: polls since then, memory before
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """End what is beyond its bounds, for ever."""
        while self.busy.wait():
            time.sleep(POLL)
            with self.lock:
                memory = _memory()
                for thread, (polls, before) in list(self.began.items()):
                    # Polls, and no clock, which goes on while the process is stopped.
                    self.began[thread] = polls + 1, before
                    if polls * POLL > SECONDS or memory - before > MEMORY:
                        del self.began[thread]
                        _raise_in(thread, EndedTemplate)
                if not self.began:
                    self.busy.clear()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function within the bounds."""
        thread = threading.get_ident()
        with self.lock:
            self.began[thread] = 0, _memory()
            self.busy.set()
        try:
            return function()
        finally:
            with self.lock:  # nothing is raised from here on
                self.began.pop(thread, None)
                _raise_in(thread, None)


@once_per_process
def _watch() -> TemplateWatch:
    return TemplateWatch()


def bounded(function: Callable[[], T]) -> T:
    """Call a function that renders a template; EndedTemplate if it is beyond the bounds."""
    return _watch().call(function)


def _memory() -> int:
    """Return the bytes that this process holds; 0 if the system does not say."""
    file = Path("/proc/self/statm")
    if file.exists():
        return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next operation; None takes it back."""
    kind = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)
