"""A server on loopback that answers as it is told, and fails on demand."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One request."""

    path: str
    body: Any
    headers: dict[str, str]  # names in lower case


class Said(NamedTuple):
    """One answer: a JSON value, or bytes as they are."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012


# What answers a request by itself, or what is said.
Answer = Said | Callable[[BaseHTTPRequestHandler], None]


class _Threads(ThreadingHTTPServer):
    request_queue_size = 256


class Loopback:
    """A server whose `answer` may be set; it counts what it is asked, and how much at a time."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.now = self.most_at_once = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                stub.reply(self, Asked(self.path, json.loads(text), headers))

            def do_GET(self) -> None:
                stub.reply(self, Asked(self.path, None, {}))

            def log_message(self, *_: Any) -> None:
                pass

        self.server = _Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = self.server.serve_forever
        threading.Thread(target=serve, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def reply(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
        said = self.answer(asked)
        with self._lock:
            self.now -= 1
        with suppress(ConnectionError):  # who asked has not waited
            if isinstance(said, Said):
                _say(handler, said)
            else:
                handler.close_connection = True
                said(handler)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _say(handler: BaseHTTPRequestHandler, said: Said) -> None:
    body = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
    handler.send_response(said.status)
    for name, value in {"Content-Length": str(len(body)), **said.headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without a word."""


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    """Promise more than is sent."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [')
