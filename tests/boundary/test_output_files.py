"""Files that a run writes leave whatever a link of their name points to as it is."""

import ast
import os
from pathlib import Path

import pytest

import rlhf_pg
from rlhf_pg import GRPOConfig
from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.cli.evaluate import parse_flags
from rlhf_pg.config import dump
from rlhf_pg.report.html import write_document
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.run_files import JsonLines
from rlhf_pg.runtime import Runtime
from tests.report.synthetic import tokens_of

OTHERS = "not the run's"


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A file outside of the run."""
    path = tmp_path / "others.txt"
    path.write_text(OTHERS)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def lock(path: Path) -> None:
    with run_dir_lock(path.parent, Runtime()):
        pass


WRITERS = {
    "report.html": lambda path: write_document(path, "title", {}),
    "config.yaml": lambda path: dump(GRPOConfig(), path),
    "step-00000001.safetensors": lambda path: tokens_of([(0, 0)], [1], [5], ["a"], {}).save(path),
    "metrics.jsonl": lambda path: JsonLines(path, 0),
    "lock": lock,
}


@pytest.mark.parametrize("name", WRITERS)
def test_link_in_place_of_a_file_is_refused_by_name(run: Path, others: Path, name: str) -> None:
    for target in (others, run / "nowhere", run, Path(os.devnull)):
        (run / name).symlink_to(target)
        with pytest.raises((OSError, ValueError), match=rf"a link.*move it away.*{name}"):
            WRITERS[name](run / name)
        (run / name).unlink()
    assert others.read_text() == OTHERS
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("name", WRITERS)
def test_link_under_an_earlier_partial_name_is_not_written_to(
    run: Path, others: Path, name: str
) -> None:
    (run / f"partial-{name}").symlink_to(others)
    WRITERS[name](run / name)
    assert others.read_text() == OTHERS
    assert (run / name).is_file()


def test_lines_are_not_appended_through_a_link(run: Path, others: Path, caplog) -> None:
    lines = JsonLines(run / "metrics.jsonl", 0)
    lines.path.unlink()
    lines.path.symlink_to(others)
    lines.write({"step": 1})
    assert others.read_text() == OTHERS
    assert "lacks lines from here on" in caplog.text


def test_json_of_an_evaluation_to_a_link_is_refused_before_it(run: Path, others: Path) -> None:
    (run / "out.json").symlink_to(others)
    with pytest.raises(SystemExit):
        parse_flags(["model", "--json", str(run / "out.json")])


def test_page_of_two_writers_is_that_of_the_last(run: Path) -> None:
    page = run / "report.html"

    def parts():
        yield b"one "
        write_file(page, [b"other"])
        yield b"page"

    write_file(page, parts())
    assert page.read_bytes() == b"one page"
    assert os.listdir(run) == ["report.html"]


def test_files_of_a_killed_writer_are_removed(run: Path) -> None:
    (run / "tokens").mkdir()
    for left in ("partial-0123-report.html", "tokens/partial-0123-step-00000001.safetensors"):
        (run / left).write_text("half")
    Journal(run, 1, is_main=True)
    assert not list(run.rglob("partial-*"))


def test_resume_does_not_wait_for_a_pipe(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl"):
        JsonLines(run / "metrics.jsonl", 1)


def test_package_writes_files_in_one_place() -> None:
    """Others write into directories that are new and get their name when they are complete."""
    package = Path(rlhf_pg.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            given = {x.value for x in node.args if isinstance(x, ast.Constant)}
            opens = name == "open" and given & {"w", "a", "x", "wb", "ab", "xb"}
            own = any(key.arg == "opener" for key in node.keywords)
            if name in ("write_text", "write_bytes", "touch") or (opens and not own):
                found.add(path.relative_to(package).as_posix())
    assert found == {"boundary/pool.py", "models/streaming.py"}  # of Linux, and a checkpoint's
