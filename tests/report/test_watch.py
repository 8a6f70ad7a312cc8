"""`rlhf-pg watch`: a server for this machine alone, and a run's end."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_pg.checkpoint import run_dir
from rlhf_pg.report import watch
from rlhf_pg.report.watch import GrowingLines, Server, has_ended
from rlhf_pg.report.watch_text import screen, sparkline, watch_text
from tests.report.conftest import HOSTILE
from tests.report.synthetic import make_run


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server(run) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.server_port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_page_data_and_steps_are_served(server: Server) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200
    assert b'"live":true' in page
    assert b"connect-src 'self'" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b'id="step-' not in page  # asked for when they are looked at
    status, content, _ = ask(server, "/data.json")
    data = json.loads(content)
    assert [step["step"] for step in data["steps"]] == [10, 20, 30, 40]
    status, packed, _ = ask(server, "/step/40")
    assert status == 200
    assert packed[:2] == b"\x1f\x8b"


def test_nothing_new_is_no_content(server: Server, run: Path) -> None:
    tag = json.loads(ask(server, "/data.json")[1])["tag"]
    assert ask(server, f"/data.json?have={tag}")[:2] == (204, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward": 0.5}\n')
    status, content, _ = ask(server, f"/data.json?have={tag}")
    assert status == 200
    assert json.loads(content)["runs"][0]["x"]["step"][-1] == 41


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost", "127.0.0.1:1", ""])
def test_foreign_host_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/data.json", "/step/40"):
        status, content, _ = ask(server, path, host=host)
        assert status == 403
        assert b"run" not in content


def test_localhost_by_name_is_answered(server: Server) -> None:
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(server: Server, method: str) -> None:
    assert ask(server, "/", method)[0] == 405


@pytest.mark.parametrize("path", ["/step/11", "/step/..", "/config.yaml", "/step/1e1", "/x"])
def test_nothing_else_is_served(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_server_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_run_has_ended_when_its_model_is_newer_than_its_lines(run: Path) -> None:
    (run / "lock").write_text(f"host {socket.gethostname()}, pid {os.getpid()}\n")
    assert not has_ended(run)
    (run / "final").mkdir()
    os.utime(run / "metrics.jsonl", (1000, 1000))
    assert has_ended(run)
    os.utime(run / "final", (900, 900))  # of before it was resumed
    assert not has_ended(run)


def test_run_has_ended_when_its_process_is_gone(run: Path) -> None:
    assert has_ended(run)  # nobody holds it
    (run / "lock").write_text(f"host {socket.gethostname()}, pid {2**22 + 1}\n")
    assert has_ended(run)
    (run / "lock").write_text(f"host another-than-{socket.gethostname()}, pid 1\n")
    assert not has_ended(run)


def test_lock_is_that_of_run_directories(tmp_path: Path) -> None:
    with run_dir.locked(tmp_path):
        assert not has_ended(tmp_path)
    assert watch.LOCK == run_dir.LOCK


def test_growing_file_is_read_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = GrowingLines(file)
    assert lines.read() == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert lines.read() == [{"step": 1}, {"step": 2}]
    with file.open("a") as more:
        more.write('ep": 3}\n')
    assert lines.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    file.write_text('{"step": 9}\n')  # of another run
    assert lines.read() == [{"step": 9}]
    new = tmp_path / "new"
    new.write_text('{"step": 1}\n{"step": 4}\n')
    new.replace(file)  # as when a run is resumed
    assert lines.read() == [{"step": 1}, {"step": 4}]


# --------------------------------------------------------------------------------- in the terminal


def shown(directory: Path, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(screen(directory, console))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_text_has_numbers_trouble_and_completions(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path / "mine", steps=120))
    assert "mine  PPO  Qwen2.5-0.5B-Instruct  120 of 1000 steps" in text
    assert "! Entropy collapse since step" in text
    assert "rewards/accuracy/mean" in text
    assert "What is" in text


def test_text_escapes_what_models_say(hostile_run: Path) -> None:
    text = shown(hostile_run)
    for character in ("\x1b", "\u202e", "\x9b", "\x07", "\u2028"):
        assert character not in text
    assert "\\x1b[31mred" in "".join(line.strip() for line in shown(hostile_run, 300).splitlines())
    assert HOSTILE[0] in shown(hostile_run, 300)


def test_text_of_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert "no step has been taken yet" in shown(tmp_path)


def test_text_ends_with_the_run(run: Path) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100)
    watch_text(run, console, seconds=0)  # which nobody holds
    assert "ended" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("numbers", "line"),
    [([0, 1], "▁█"), ([1, 1, 1], "▁▁▁"), ([0, 0, 7, 7], "▁█"), ([5], "▁")],
)
def test_sparkline_is_means_between_lowest_and_highest(numbers: list[float], line: str) -> None:
    assert sparkline(numbers, width=min(2, len(numbers)) if len(numbers) == 4 else 40) == line
