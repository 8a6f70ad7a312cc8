"""What is released: the files in dist/, and the wheel in an empty directory and environment."""

import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from rlhf_pg import __version__
from tests.test_code_blocks import BLOCKS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.release
INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md"}


def tracked() -> set[str]:
    """The files of the package, and the recipes, which a checkout has beside it."""
    command = ["git", "ls-files", "rlhf_pg", "recipes"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    inside = {f"rlhf_pg/{name}" for name in listed if name.startswith("recipes/")}
    return inside | {name for name in listed if name.startswith("rlhf_pg/")} - {"rlhf_pg/recipes"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    return ROOT / "dist" / f"rlhf_pg-{__version__}-py3-none-any.whl"


def test_wheel_has_package_and_recipes_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {f"rlhf_pg-{__version__}.dist-info/{name}" for name in INFO}
    info.add(f"rlhf_pg-{__version__}.dist-info/licenses/rlhf_pg/report/page/uPlot-LICENSE")
    assert names == tracked() | info


def test_sdist_has_sources_alone() -> None:
    with tarfile.open(ROOT / "dist" / f"rlhf_pg-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    own = {".gitignore", "pyproject.toml"}
    assert names == tracked() | BESIDE | own


def test_changelog_begins_with_version() -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    assert heading[1] == __version__


def test_wheel_trains_from_empty_directory(wheel: Path, tmp_path: Path) -> None:
    """The demo, then the files and commands of docs/your-data.md; prints the seconds of each."""
    bin_dir = tmp_path / "venv" / "bin"
    work = tmp_path / "work"
    work.mkdir()
    blocks = BLOCKS[ROOT / "docs" / "your-data.md"]
    for name, _, _, text in blocks:
        if name:
            (work / name).write_text(text)
    [commands] = (text for _, _, _, text in blocks if text.startswith("rlhf-pg train sft"))

    def run(*command: str) -> str:
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=work,
            env={"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{time.monotonic() - start:6.0f} s  {' '.join(command)}")
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run("pip", "install", "-q", "--no-compile", *constraints, "torch", str(wheel))
    run("rlhf-pg", "demo")
    for command in commands.splitlines():
        said = run(*command.split())
    accuracy = re.search(r"accuracy\D+([\d.]+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.6
    run("rlhf-pg", "report", "runs/mine")
    assert "<html" in (work / "runs" / "mine" / "report.html").read_text()
