"""The CPU's numbers, which a process of its own computes beside the tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = "DEVICE_REFERENCE"  # a file that has them already
PATIENCE = 300  # seconds

# Without `-p tests.device.plugin`, which comes before torch, there is no device: see the Makefile.
collect_ignore_glob = [] if "tests.device.plugin" in sys.modules else ["test_*.py"]


class Reference:
    """Numbers of `tests.device.runs` by the name of the run, waited for if need be."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path, self.process = path, None
        if not path.exists():
            path.touch()
            self.process = start(path, names)

    def __getitem__(self, name: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (found := json.loads(line))["name"] == name:
                    return found
            if self.process is None or self.process.poll() not in (None, 0):
                raise RuntimeError(f"the CPU has no numbers of {name}: see its output above")
            time.sleep(0.1)
        raise TimeoutError(f"the CPU's numbers of {name}")


def start(path: Path, names: list[str]) -> "subprocess.Popen[bytes]":
    """A process that makes these runs on a CPU."""
    own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "PRETEND_CUDA"} | own
    command = [sys.executable, "-m", "tests.device.runs", str(path), *names]
    return subprocess.Popen(command, env=environment, cwd=ROOT)


@pytest.fixture(scope="module")
def expected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """What a CPU makes of the runs that a file tests, in the order of the tests."""
    own = [item for item in request.session.items if getattr(item, "module", 0) is request.module]
    names = [item.callspec.params.get("run") for item in own]  # type: ignore[attr-defined]
    names = [name for name in names if name] or request.module.RUNS
    given = os.environ.get(REFERENCE)
    path = Path(given) if given else tmp_path_factory.mktemp("cpu") / "numbers.jsonl"
    reference = Reference(path, list(dict.fromkeys(names)))
    yield reference
    if reference.process is not None:
        reference.process.terminate()
        reference.process.wait()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    from tests.device.runs import quiet

    quiet()
