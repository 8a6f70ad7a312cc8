"""Output streams whose reader may leave, as `head` does: only what is written then is lost."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Keep broken pipes from ending what is run inside, code of users included."""
    with _outliving("stdout"), _outliving("stderr"):
        yield


@contextmanager
def _outliving(name: str) -> Iterator[None]:
    theirs = getattr(sys, name)
    if not _is_pipe(theirs):
        yield
        return
    raw = _Pipe(theirs.fileno(), "w", closefd=False)
    ours = io.TextIOWrapper(
        raw if theirs.write_through else io.BufferedWriter(raw),
        encoding=theirs.encoding,
        errors=theirs.errors,
        line_buffering=theirs.line_buffering,
        write_through=theirs.write_through,
    )
    try:
        theirs.flush()
    except BrokenPipeError:
        raw.silence()
    setattr(sys, name, ours)
    try:
        yield
    finally:
        if not ours.closed:
            ours.flush()
        if getattr(sys, name) is ours:
            setattr(sys, name, theirs)


def _is_pipe(stream: Any) -> bool:
    """Return whether a stream is text that goes straight to a pipe or a socket."""
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return False
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if not isinstance(raw, io.FileIO) or isinstance(raw, _Pipe):
        return False
    mode = os.fstat(raw.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class _Pipe(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.silence()
            return len(data)

    def silence(self) -> None:
        """Redirect all that writes to the file, from other languages too, to the null device."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
