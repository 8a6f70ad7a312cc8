"""Programs that pass tests, in a sandbox that programs try to leave.

What needs bubblewrap is skipped where there is none; that it is not done without is tested
everywhere.
"""

import ctypes
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_pg.rewards.verifiers import make_verifier, programs
from rlhf_pg.rewards.verifiers.programs import cases_in, passes, program_in, run_in_sandbox
from rlhf_pg.rewards.verifiers.texts import Unreadable

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")

NEXT = "def f(x):\n    return x + 1\n"
RIGHT = "assert f(1) == 2"
SECONDS = 2.0


def right(program: str) -> bool:
    """Whether a program passes its test."""
    return passes(textwrap.dedent(program), RIGHT, SECONDS)


def says_yes(program: str) -> bool:
    """Whether a program prints "yes"."""
    return passes(textwrap.dedent(program), ("", "yes"), SECONDS)


def score(completions, truths, **options):
    return make_verifier("code", options)([], completions, None, answer=truths)


def test_refuses_to_start_without_bubblewrap(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    programs.check_sandbox.cache_clear()
    with pytest.raises(ValueError, match=r"reward code: .*no `bwrap`.*apt install bubblewrap"):
        make_verifier("code", {})


@pytest.mark.parametrize("complaint", ["Unknown option --disable-userns", ""])
def test_refuses_where_no_sandbox_can_be_made(monkeypatch, complaint) -> None:
    failing = ["sh", "-c", f"printf '{complaint}' >&2; exit 1"]
    monkeypatch.setattr(programs, "sandbox_command", lambda *_: failing)
    programs.check_sandbox.cache_clear()
    with pytest.raises(ValueError, match=f"reward code: .*here .{complaint or 'bwrap failed'}"):
        make_verifier("code", {})


def test_refuses_a_processor_whose_calls_it_does_not_know(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    programs.check_sandbox.cache_clear()
    with pytest.raises(ValueError, match="system calls of riscv64 are not known"):
        make_verifier("code", {})


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("So:\n```py\nx = 1\n```\nor\n```\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "x = 1\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1\n```\nwhich prints\n```text\n1\n```", "x = 1\n"),
        ("```bash\nls\n```", ""),
        ("```py\nx = 1\n  ``````\nx = 2", "x = 2"),
        ("", ""),
        ("```" * 300_000, ""),  # what is searched from each of them to the end takes many minutes
    ],
)
def test_program_in_answer(answer, program) -> None:
    assert program_in(answer) == program


@pytest.mark.parametrize(
    ("truth", "cases"),
    [
        ("assert f(1) == 2", ["assert f(1) == 2"]),
        ("[f(1)] == [2] or 1 / 0", ["[f(1)] == [2] or 1 / 0"]),
        ('["assert a"]', ["assert a"]),
        ({"inputs": ["1", "2"], "outputs": ["a", "b"]}, [("1", "a"), ("2", "b")]),
        ([{"input": "1", "output": "a", "type": "stdin"}], [("1", "a")]),
        ('{"inputs": ["1"], "outputs": ["a"], "fn_name": null}', [("1", "a")]),
    ],
)
def test_tests_in_column(truth, cases) -> None:
    assert cases_in(truth) == cases


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ({"inputs": ["1", "2"], "outputs": ["a"]}, "inputs with outputs"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, "'f'.*write assertions"),
        ([1], "1 is neither"),
        (5, "Python statements"),
    ],
)
def test_unreadable_tests_say_why(truth, why) -> None:
    with pytest.raises(Unreadable, match=why):
        cases_in(truth)


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (NEXT, True),
        ("from __future__ import annotations\n" + NEXT, True),
        (NEXT + "print('noise' * 1000)\nimport sys; print('x', file=sys.stderr)", True),
        ("", False),
        ("\0", False),
        ("import os; os._exit(0)", False),
        (NEXT + '"""', False),
        ("import signal, time; signal.alarm(1); signal.pause()", False),
    ],
)
def test_statements(program, expected) -> None:
    assert right(program) == expected


@needs_bwrap
def test_exit_status() -> None:
    assert run_in_sandbox("exit(3)", timeout=SECONDS) == (3, "")
    assert run_in_sandbox("while True: pass", timeout=0.5) == (137, "")


@needs_bwrap
def test_score_is_all_or_the_share_of_tests() -> None:
    answers = [f"```python\n{NEXT}```", "def f(x):\n    return 2", "", f"<think>{NEXT}"]
    tests = [[RIGHT, "assert f(2) == 3"]] * 4
    assert score(answers, tests) == [1, 0, 0, 0]
    assert score(answers, tests, partial=True) == [1, 0.5, 0, 0]
    assert score(["x", "x"], [None, []]) == [None, None]
    made = make_verifier("code", {"timeout": 1})
    assert pickle.loads(pickle.dumps(made)) == made


@needs_bwrap
def test_inputs_and_outputs() -> None:
    tests = json.dumps({"inputs": ["2 3\n", "4 5"], "outputs": ["5\n", "9"]})
    answers = [
        "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()",
        "print(5)",
        "print('x')",
        "print(5); raise SystemExit(1)",
        "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))",
    ]
    assert score(answers, [tests] * 5, partial=True) == [1, 0.5, 0, 0, 1]


@needs_bwrap
def test_same_program_gives_the_same_output() -> None:
    program = "print([*{str(i) for i in range(50)}])"
    assert run_in_sandbox(program) == run_in_sandbox(program)
    assert right("import os; assert os.environ['PYTHONHASHSEED'] == '0'\n" + NEXT)


@needs_bwrap
def test_total_time_bounds_all_tests() -> None:
    options = {"timeout": 5.0, "total_timeout": 1.2, "partial": True}
    slow = "import time; time.sleep(0.4)\n" + NEXT
    assert score([slow], [[RIGHT] * 10], **options)[0] < 0.5  # all would pass, one by one


@needs_bwrap
def test_tests_of_a_row_do_not_meet() -> None:
    """Neither files nor processes outlive the test that made them."""
    program = """
        import os, subprocess
        running = [open(f"/proc/{n}/comm").read() for n in os.listdir("/proc") if n.isdigit()]
        print("no" if os.path.exists("/tmp/a") or "sleep\\n" in running else "yes")
        os.makedirs("/tmp/a/b")
        subprocess.Popen(["sleep", "100"], start_new_session=True)
    """
    assert says_yes(program)
    assert says_yes(program)


ATTACKS = {
    "writes to the root": 'open("/planted", "w")',
    "writes to the system": 'open("/usr/planted", "w")',
    "writes to Python": "import json; open(json.__file__, 'a')",
    "writes to /dev": 'open("/dev/planted", "w")',
    "writes to the kernel": 'open("/proc/sys/kernel/hostname", "w").write("x")',
    "remounts": 'import subprocess as s; s.run(["mount", "-o", "remount,rw", "/"], check=True)',
    "makes a namespace": 'import subprocess as s; s.run(["unshare", "-U", "true"], check=True)',
    "becomes root": "import os; os.setuid(0)",
    "raises its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "looks up a name": 'import socket; socket.getaddrinfo("example.com", 80)',
    "connects": 'import socket; socket.create_connection(("1.1.1.1", 80), 1)',
    "takes much memory": 'x = b"x" * (1 << 30)',
    "prints much": "while True: print('x' * 10000)",
    "writes a large file": 'open("/tmp/x", "wb").write(bytes(4 << 20))',
    "fills the disk": (
        'for i in range(200): open(f"/tmp/{i}", "wb").write(bytes(1 << 20))'
    ),
    "fills shared memory": (
        'for i in range(200): open(f"/dev/shm/{i}", "wb").write(bytes(1 << 20))'
    ),
    "opens many files": "files = [open('/dev/null') for _ in range(1000)]",
    "forks": "import os\nwhile True: os.fork()",
    "forks and leaves": (
        "import os, time\nfor _ in range(100):\n    if not os.fork(): os.setsid(); time.sleep(99)"
    ),
    "starts threads": (
        "import threading, time\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    ),
}  # fmt: skip


@needs_bwrap
@pytest.mark.parametrize("attack", ATTACKS)
def test_program_cannot(attack) -> None:
    status, _ = run_in_sandbox(ATTACKS[attack], timeout=SECONDS)
    assert status not in (0, 137)


@needs_bwrap
def test_loopback_is_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
            import socket
            try:
                socket.create_connection(("127.0.0.1", {port}), 1)
            except OSError:
                print("yes")
        """
        assert says_yes(program)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@needs_bwrap
def test_program_sees_no_files_and_no_environment_of_the_trainer(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    secret = tmp_path / "secret"
    secret.write_text("hush")
    program = f"""
        import os, pathlib
        places = ({str(secret)!r}, {__file__!r}, {str(Path.home() / ".cache")!r})
        places += ("/etc/passwd", "/sys", "/home", "/var")
        seen = [place for place in places if os.path.exists(place)]
        told = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/environ")
            if p.parent.name != "1"]
        hidden = "SECRET_TOKEN" not in os.environ and not any(b"hush" in text for text in told)
        print("yes" if hidden and not seen and os.getcwd() == "/tmp" else seen)
    """
    assert says_yes(program)


@needs_bwrap
def test_program_does_not_outlive_what_watches_it() -> None:
    mark = f"87654.{os.getpid()}"
    program = f"""
        import os
        for number in (1, 2, 9, 15):
            os.kill(1, number)
        os.execvp("sleep", ["sleep", "{mark}"])
    """
    assert not right(program)
    assert not _running(mark)


@needs_bwrap
def test_time_is_watched_from_outside(monkeypatch) -> None:
    """What watches the time inside is as good as stopped."""
    mark, command = f"76543.{os.getpid()}", programs.sandbox_command
    monkeypatch.setattr(programs, "GRACE", 0.5)
    monkeypatch.setattr(programs, "sandbox_command", lambda _, *files: command(600.0, *files))
    program = f'import os; os.execvp("sleep", ["sleep", "{mark}"])'
    assert run_in_sandbox(program, timeout=0.5) == (137, "")
    assert _within(10, lambda: not _running(mark))


@needs_bwrap
def test_program_cannot_make_calls_of_the_filter() -> None:
    program = f"""
        import ctypes, errno
        kernel = ctypes.CDLL(None, use_errno=True)
        numbers = {[programs.call(name) for name in programs.BLOCKED]}
        if {os.uname().machine == "x86_64"}:
            numbers.append(39 + (1 << 30))  # getpid, by its other number
        answers = [(kernel.syscall(n, 0, 0, 0, 0, 0), ctypes.get_errno()) for n in numbers]
        print("yes" if {{*answers}} == {{(-1, errno.EPERM)}} else answers)
    """
    assert says_yes(program)


@needs_bwrap
def test_program_cannot_say_that_there_is_no_sandbox() -> None:
    program = """
        for n in (1, 2):
            try:
                open(f"/proc/{n}/fd/2", "w").write("x")
            except OSError:
                pass
        print("yes")
    """
    assert says_yes(program)


def test_sandbox_has_a_keyring_of_its_own() -> None:
    kernel, number = ctypes.CDLL(None), programs.call("keyctl")

    def session() -> int:
        return kernel.syscall(number, 0, -3, 1)

    def other() -> int:
        programs.join_new_keyring()
        return session()

    if (before := session()) < 0:
        pytest.skip("keyrings are not allowed here")
    with ThreadPoolExecutor(1) as alone:
        assert alone.submit(other).result() not in (before, -1)
    assert session() == before


@needs_bwrap
def test_program_has_no_privileges() -> None:
    program = """
        status = open("/proc/self/status").read()
        wanted = [f"{name}:\\t0000000000000000" for name in ("CapPrm", "CapEff", "CapBnd")]
        lacking = [name for name in (*wanted, "NoNewPrivs:\\t1") if name not in status]
        print(lacking or "yes")
    """
    assert says_yes(program)


@needs_bwrap
@pytest.mark.slow
def test_sandbox_ends_when_its_time_is_over_even_without_the_trainer() -> None:
    """The trainer is killed while a program runs for ever."""
    mark = f"98765.{os.getpid()}"
    trainer = (
        "from rlhf_pg.rewards.verifiers.programs import run_in_sandbox\n"
        f"run_in_sandbox(\"import os; os.execvp('sleep', ['sleep', '{mark}'])\", timeout=4.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", trainer])
    try:
        assert _within(30, lambda: _running(mark))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert _within(20, lambda: not _running(mark))


def _running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{mark}\0".encode():
                return True
        except OSError:
            continue
    return False


def _within(seconds: float, happens) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.05)
    return False
