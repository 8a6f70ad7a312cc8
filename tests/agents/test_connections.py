"""Connections that ask nothing, ask slowly or too much do not keep an endpoint from the others."""

import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from rlhf_pg.agents import connections
from rlhf_pg.agents.endpoint import Endpoint, serve
from rlhf_pg.agents.history import History
from tests.agents.test_runner import ASK, ask, play

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"


def connect(url: str | None = None) -> socket.socket:
    parts = urlsplit(url or serve("127.0.0.1").url)
    return socket.create_connection((parts.hostname, parts.port), 10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, or does so while it is waited for."""
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:  # it was reset
        return True
    return True


def holds(test: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not test() and time.monotonic() < deadline:
        time.sleep(0.01)
    return test()


def test_idle_connections_without_a_key_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 8)
    idle = [connect() for _ in range(40)]
    kept: list[socket.socket] = []
    # A connection whose request is still on its way is one without a key too.
    alone = threading.Lock()

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        with alone:
            ask(endpoint)
            kept.extend(connect() for _ in range(20))
            ask(endpoint)
        return 1.0

    episodes = play(program, n=2, rows=2)
    assert [episode.error for episode in episodes] == [None] * 4
    for connection in idle[:32]:
        assert is_closed(connection)
    for connection in [*idle, *kept]:
        connection.close()


@pytest.mark.parametrize("sent", ["", "GET /v1/mod", HEAD, HEAD + "Content-Length: 99\r\n\r\n["])
def test_request_that_does_not_arrive_is_given_up(
    monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(connections, "REQUEST_SECONDS", 0.1)
            connection = connect(endpoint.base_url)
            connection.sendall(sent.format(key=endpoint.api_key).encode())
            assert is_closed(connection)
        ask(endpoint)
        return 1.0

    [episode] = play(program)
    assert episode.error is None


def test_body_of_a_refused_request_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
    with connect() as connection:
        connection.sendall(f"{HEAD}Content-Length: {10**12}\r\n\r\n".encode())

        def is_reset() -> bool:
            try:
                return connection.send(b" ") == 0
            except OSError:
                return True

        assert holds(is_reset)


def test_connections_of_an_ended_episode_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ENDED_SECONDS", 0.0)
    left: list[socket.socket] = []

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        ask(endpoint)
        left.append(connect(endpoint.base_url))
        body = json.dumps({"prompt": "a"})
        head = HEAD.format(key=endpoint.api_key) + f"Content-Length: {len(body)}\r\n\r\n"
        left[0].sendall(f"{head}{body}".encode())
        assert left[0].recv(2**16).startswith(b"HTTP/1.1 200")
        return 1.0

    [episode] = play(program)
    assert episode.error is None
    assert is_closed(left[0])


def test_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert connections.most_connections() == min(soft, 512) // 4
        connections.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_long_message_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = [], History.encode_chat
    monkeypatch.setattr(History, "encode_chat", lambda *x: encoded.append(x) or encode(*x))

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        long = [{"role": "user", "content": "a " * 2**17}]
        with pytest.raises(openai.BadRequestError) as refused:
            ask(endpoint, long)
        assert refused.value.code == "context_length_exceeded"
        ask(endpoint)
        return 1.0

    [episode] = play(program, longest_prompt=300)
    assert episode.error is None
    assert episode.truncated
    assert len(encoded) == 1


def test_message_that_is_encoded_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, encode = Event(), Event(), History.encode_chat

    def slow(*arguments: Any) -> list[int]:
        begun.set()
        assert may_go_on.wait(20)
        return encode(*arguments)

    monkeypatch.setattr(History, "encode_chat", slow)

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        asking = Thread(target=ask, args=(endpoint, ASK))
        asking.start()
        assert begun.wait(10)
        assert httpx2.get(f"{endpoint.base_url}/models", timeout=10).status_code == 200
        may_go_on.set()
        asking.join()
        return 1.0

    [episode] = play(program)
    assert (episode.error, episode.turns) == (None, 1)
