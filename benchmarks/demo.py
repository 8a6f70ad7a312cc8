"""The demo by five seeds and two kinds of kernels: `python -m benchmarks.demo [--seeds 42 1]`.

Rounding alone moves a run by some points, so the README names a range. `ATEN_CPU_CAPABILITY=avx2`
makes torch take the kernels of an older CPU. Each run begins in an empty directory, warm start
included; prints the table of docs/results-tables.md. Half an hour on two cores.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

SEEDS = [42, 1, 2, 3, 4]
KERNELS = {"the CPU's own": {}, "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"}}
SCORE = r"held-out reward (\d\.\d+)"


def run(seed: int, variables: dict[str, str]) -> str:
    """Run the demo; return the cells of its row after the kernels."""
    command = [sys.executable, "-m", "rlhf_pg.cli", "demo", "--seed", str(seed)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            command,
            cwd=directory,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
    before, after = re.findall(SCORE, done.stdout)[-2:]
    return f"{seed} | {before} | {after} | {time.monotonic() - start:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    print("| kernels | seed | before | after | seconds |\n|---|---|---|---|---|")
    for seed in parser.parse_args().seeds:
        for kernels, variables in KERNELS.items():
            print(f"| {kernels} | {run(seed, variables)} |", flush=True)


if __name__ == "__main__":
    main()
