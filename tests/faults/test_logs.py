"""Disks that are full under what a run writes beside its checkpoints."""

import errno
import io
import logging
import os
import resource
import signal
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from rlhf_pg.report.journal import Journal
from rlhf_pg.report.run_files import JsonLines, read
from tests.trainers.conftest import digits


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("rlhf_pg")]


@pytest.fixture
def full_disk(monkeypatch) -> set[str]:
    """The ends of the names of files for which the disk has no room."""
    names, fsync = set[str](), os.fsync

    def fails(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(tuple(names)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    return names


@pytest.mark.fault(46, "one warning for each file, and the run goes on to its end")
def test_full_disk_for_logs_warns_and_run_finishes(make, tmp_path, caplog, full_disk) -> None:
    run = tmp_path / "run"

    def reward(completions, **columns):
        if trainer.state.step == 1:
            full_disk.update({"metrics.jsonl", "completions.jsonl"})
        return digits(completions, **columns)

    trainer = make(max_steps=4, log_completions_steps=1, reward_funcs=reward)
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        trainer.train()
    assert trainer.state.step == 4
    assert (run / "final" / "model.safetensors").exists()
    said = warnings_of(caplog)
    assert len(said) == 2
    assert all("lacks lines from here on: " in line and "No space left" in line for line in said)


def test_partial_line_is_dropped_before_next_write(tmp_path, caplog) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", 0)
    lines.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # EFBIG instead
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        lines.write({"step": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    lines.write({"step": 3})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 3}]
    assert len(warnings_of(caplog)) == 1


def test_json_lines_resume_on_full_disk_keeps_lines(tmp_path, full_disk) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    full_disk.add("metrics.jsonl")
    with pytest.raises(OSError, match="No space left"):
        JsonLines(path, 1)
    assert read(path) == [{"step": 1}, {"step": 2}]


@pytest.fixture
def synced(monkeypatch) -> dict[int, int]:
    """How long a file was when it was last synced, by its inode; a directory is there too."""
    sizes = {}

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        sizes[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    return sizes


def test_json_lines_write_syncs_each_line(tmp_path, synced) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2):
        lines.write({"step": step})
        assert synced[path.stat().st_ino] == path.stat().st_size > 0


@pytest.mark.fault(50, "the run goes on quietly, and saves")
def test_closed_stdout_reader_does_not_stop_run(make, tmp_path, monkeypatch) -> None:
    """As `head` does, or a `tee` that dies."""
    ours, theirs = os.pipe()
    os.close(ours)
    with suppress(OSError), os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        make(max_steps=2, log_completions_steps=1).train()
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_unencodable_console_text_is_escaped(tmp_path) -> None:
    text = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    journal = Journal(tmp_path, 0, is_main=True)
    journal.console = Console(file=text)
    journal.say("caf\u00e9 \U0001f600 \ud800")
    text.seek(0)
    assert text.read() == "caf\u00e9 \\U0001f600 \\ud800\n"


@pytest.mark.parametrize("bad", [b'{"step": 1, "\xff', b'{"step": null}', b"[1]"])
def test_unreadable_line_is_dropped_on_resume(tmp_path, caplog, bad) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 2}\n{"step": 3}\n')
    JsonLines(path, 2)
    assert [line["step"] for line in read(path)] == [1, 2]
    assert "has unreadable lines" in warnings_of(caplog)[0]
