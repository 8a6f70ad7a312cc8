"""The page of a run that goes on, from a server on this machine for this machine alone.

It answers GET, under its own address and no other: a page elsewhere that gives its name this
machine's address (DNS rebinding) is refused, as is whoever else asks for another host.
"""

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rlhf_pg.report.html import LIBRARY, STYLES, as_json, document, our_script, part, policy
from rlhf_pg.report.logged_steps import LoggedSteps
from rlhf_pg.report.run_files import COMPLETIONS, METRICS, TOKENS, TRACE, RunFiles, records_in
from rlhf_pg.report.run_page import column_data, run_data
from rlhf_pg.report.token_steps import KNOWN

LOOPBACK = "127.0.0.1"
LOCK, HOLDER = "lock", re.compile(r"host (.*), pid (\d+)")  # as checkpoint/run_dir.py has them
WATCHED = (METRICS, COMPLETIONS, TRACE, TOKENS, "config.yaml", "final", LOCK)
CONNECT = "'self'"


def has_ended(directory: Path) -> bool:
    """Return whether a run has ended: with its model saved, or without as its process is gone."""
    final, metrics = directory / "final", directory / METRICS
    if final.is_dir():
        return not metrics.exists() or final.stat().st_mtime >= metrics.stat().st_mtime
    return not _is_held(directory / LOCK)


def _is_held(lock: Path) -> bool:
    """Return whether the process that a lock names may still be there."""
    try:
        found = HOLDER.match(lock.read_text(errors="replace"))
    except OSError:
        return False
    if found is None or found[1] != socket.gethostname():
        return True  # another machine's: nobody here can say
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


class GrowingLines:
    """A file of JSON lines that grows, of which each line is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._end = inode, 0
        self._records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the records of all whole lines."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._end:
                    self._begin(stat.st_ino)  # another run, or this one was resumed
                file.seek(self._end)
                new = file.read()
        except OSError:
            self._begin(None)
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._records += records_in(whole)
        self._end += len(whole)
        return self._records


class Watched:
    """A run as the page of `rlhf-pg watch` sees it, read again when its files have changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = Lock()
        self._metrics = GrowingLines(directory / METRICS)
        self._completions = GrowingLines(directory / COMPLETIONS)
        self._read: tuple[str, dict[str, Any], LoggedSteps] | None = None
        self._summaries: dict[int, tuple[Any, dict[str, Any]]] = {}

    def tag(self) -> str:
        """Return what changes with the files of the run."""
        states = []
        for name in WATCHED:
            with contextlib.suppress(OSError):
                stat = (self.directory / name).stat()
                states.append(f"{name}:{stat.st_mtime_ns}:{stat.st_size}")
        states.append(str(has_ended(self.directory)))
        return hashlib.sha256(" ".join(states).encode()).hexdigest()[:16]

    def data(self) -> dict[str, Any]:
        """Return what the page shows."""
        return self._current()[0]

    def step(self, number: int) -> bytes | None:
        """Return a packed step; None if there is no such step."""
        logged = self._current()[1]
        return logged.packed(number) if number in logged.records else None

    def _current(self) -> tuple[dict[str, Any], LoggedSteps]:
        with self._lock:
            tag = self.tag()
            if self._read is None or self._read[0] != tag:
                self._read = (tag, *self._again(tag))
            return self._read[1:]

    def _again(self, tag: str) -> tuple[dict[str, Any], LoggedSteps]:
        files = RunFiles(self.directory)
        # In the place of what the properties would read, and then keep.
        vars(files).update(metrics=self._metrics.read(), completions=self._completions.read())
        logged = LoggedSteps.of(files)
        data = run_data(files) | {
            "steps": [self._summary(logged, step) for step in logged.records],
            "columns": column_data(KNOWN),
            "left_out": "",
            "live": True,
            "ended": has_ended(self.directory),
            "tag": tag,
        }
        return data, logged

    def _summary(self, logged: LoggedSteps, step: int) -> dict[str, Any]:
        state = logged.state(step)
        known = self._summaries.get(step)
        if known is None or known[0] != state:
            known = self._summaries[step] = (state, logged.summary(step))
        return known[1]


class Server(ThreadingHTTPServer):
    """A server of one run on the loopback address.

    Args:
        port: 0 for one that is free.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.watched = Watched(directory)
        super().__init__((LOOPBACK, port), Handler)
        styles, scripts = [part(name) for name in STYLES], [part(LIBRARY), our_script()]
        self.policy = policy(styles, scripts, CONNECT)

    @property
    def address(self) -> str:
        """The address for a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """The names under which it answers."""
        return {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}


class Handler(BaseHTTPRequestHandler):
    """The answers: the page, its data, and packed steps."""

    server: Server
    server_version, sys_version = "rlhf-pg", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(403, "text/plain", [b"this server answers under its own address alone\n"])
            return
        address = urlsplit(self.path)
        step = re.fullmatch(r"/step/(\d{1,15})", address.path)
        if address.path == "/":
            self._page()
        elif address.path == "/data.json":
            self._data(parse_qs(address.query).get("have", [""])[0])
        elif step is not None and (content := self.server.watched.step(int(step[1]))) is not None:
            self._answer(200, "application/octet-stream", [content])
        else:
            self._answer(404, "text/plain", [b"there is nothing here\n"])

    def _refused(self) -> None:
        self._answer(405, "text/plain", [b"only GET is answered\n"])

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _refused

    def _page(self) -> None:
        data = self.server.watched.data()
        pieces = document(data["title"], data, connect=CONNECT)
        self._answer(200, "text/html; charset=utf-8", [piece.encode() for piece in pieces])

    def _data(self, have: str) -> None:
        if have and have == self.server.watched.tag():
            self._answer(204, "application/json", [])
        else:
            said = as_json(self.server.watched.data()).encode()
            self._answer(200, "application/json", [said])

    def _answer(self, status: int, kind: str, pieces: Iterable[bytes]) -> None:
        body = b"".join(pieces)
        with contextlib.suppress(ConnectionError):  # the reader has left
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Security-Policy", self.server.policy)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of single requests."""


HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
