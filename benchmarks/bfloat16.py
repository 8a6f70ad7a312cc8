"""The phases of a step in bfloat16 beside those in float32, by hand.

    OMP_NUM_THREADS=1 python -m benchmarks.bfloat16 short [--rounds 3]

GRPO on the workloads and the model of `benchmarks.peer`. Every round takes a step of each;
printed are medians.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import transformers

from benchmarks.peer import ours
from benchmarks.peer.workload import WORKLOADS, Job, save_model

DTYPES = ("float32", "bfloat16")
PHASES = ("rollout", "update", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        model, workload = save_model(Path(directory), 256, 256, 6), WORKLOADS[flags.workload]
        jobs = {
            dtype: Job(workload, "grpo", model, 256, dtype, f"{directory}/{dtype}")
            for dtype in DTYPES
        }
        steps = {dtype: ours.stepper(job, job.load()) for dtype, job in jobs.items()}
        rounds = [{dtype: step() for dtype, step in steps.items()} for _ in range(1 + flags.rounds)]
    for phase in PHASES:  # the first round warms up
        single, half = (statistics.median(one[t][phase] for one in rounds[1:]) for t in DTYPES)
        print(f"{phase:8} float32 {single:6.2f} s  bfloat16 {half:6.2f} s: {half / single:.2f}x")


if __name__ == "__main__":
    main()
