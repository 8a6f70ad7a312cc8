"""Put every known mistake of GPUs into a copy of the repository, and see a test fail.

    python -m tests.device.run_mutants [--jobs 2] [--timeout 120] [name ...]

As `tests.mutants.run` does, in processes that have the pretend device.
"""

from tests.device import plugin  # isort: skip  # before torch

import importlib
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.device.conftest import REFERENCE, start
from tests.mutants import read, run

MUTANTS = read(Path(__file__).with_name("mutants.txt"))
RUN = "tests/device/test_runs.py::test_run_matches_cpu"


def main() -> int:
    """The number to exit with."""
    assert plugin
    for name in ("torch._dynamo", "torch._inductor", "torch.nn.attention.flex_attention"):
        importlib.import_module(name)
    killers = {mutant.killer for mutant in MUTANTS}
    runs = [k.removeprefix(RUN)[1:-1] for k in sorted(killers) if k.startswith(RUN)]
    with TemporaryDirectory() as directory:  # the CPU's numbers, once for all
        path = Path(directory) / "numbers.jsonl"
        if start(path, runs).wait():
            return 1
        os.environ[REFERENCE] = str(path)
        return run.main(MUTANTS)


if __name__ == "__main__":
    sys.exit(main())
