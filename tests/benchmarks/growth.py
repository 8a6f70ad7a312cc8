"""How the time of a step grows with the number of completions, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.growth

GRPO on four prompts of 512 tokens, Qwen2 of width 256 and 6 layers, float32, lengths as in
`tests.benchmarks.peer`. First as many tokens in twice as many completions of half the length, then
more completions of one length. Every round takes one step of each; printed are medians.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import transformers

from tests.benchmarks.peer import ours
from tests.benchmarks.peer.workload import Job, Workload, save_model

SHAPES = [(8, 128), (16, 64), (8, 64), (32, 64), (64, 64)]  # completions of a prompt, longest


def workload(n: int, new: int) -> Workload:
    return Workload(prompts=4, shortest=512, longest=512, n=n, new=new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), 256, 256, 6)
        jobs = {
            shape: Job(workload(*shape), "grpo", model, 256, "float32", f"{directory}/{shape}")
            for shape in SHAPES
        }
        steps = {shape: ours.stepper(job, job.load()) for shape, job in jobs.items()}
        taken: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
        for number in range(rounds + 1):
            for shape, step in steps.items():
                seconds = step()["step"]
                if number:  # the first warms up
                    taken[shape].append(seconds)
    medians = {shape: statistics.median(seconds) for shape, seconds in taken.items()}
    for (n, new), seconds in medians.items():
        tokens = int(jobs[n, new].workload.lengths.sum())
        print(f"n={n:3} of up to {new:3} new tokens ({tokens:6} in all): {seconds:6.2f} s")
    print(f"n doubled, length halved: {medians[16, 64] / medians[8, 128]:.2f}x the time")
    for n in (16, 32, 64):
        ratio = medians[n, 64] / medians[n // 2, 64]
        print(f"n doubled to {n}: {ratio:.2f}x the time")


if __name__ == "__main__":
    main()
