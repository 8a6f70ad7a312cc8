import argparse
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from benchmarks.peer import __doc__ as usage, gradients, memory, ours, theirs
from benchmarks.peer.workload import BETAS, FAMILIES, WORKLOADS, Job, device, save_model

Seconds = dict[str, float]
PHASES = ("step", "rollout", "reward", "score", "update")


def alternate(job: Job, batch: int, rounds: int) -> tuple[Seconds, Seconds]:
    """Median seconds of the phases, ours and TRL's; the first step of each warms up."""
    own: list[Seconds] = []
    other: list[Seconds] = []
    step = ours.stepper(job, job.load())

    def between(seconds: Seconds) -> None:
        other.append(seconds)
        own.append(step())
        what = f"round {len(own) - 1}" if own[1:] else "warm-up"
        print(f"{what}: ours {own[-1]['step']:.2f} s, TRL {seconds['step']:.2f} s", flush=True)

    theirs.train(job, job.load(), 1 + rounds, batch, between)
    return medians(own[1:]), medians(other[1:])


def medians(rounds: list[Seconds]) -> Seconds:
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in PHASES}


def compare(job: Job, batches: list[int], rounds: int) -> None:
    """Measure and print one method."""
    batch = theirs.fastest(job, batches)
    print(f"\n{job.method}, TRL with {batch} completions at a time", flush=True)
    own, other = alternate(job, batch, rounds)
    for phase in PHASES:
        print_row(phase, own[phase], other[phase], "s", ".2f")
    peaks = memory.peak("ours", job), memory.peak("theirs", job, batch=batch)
    print_row("peak memory", *peaks, "MiB", ".0f")
    print(f"gradients differ by {gradients.difference(job):.1e} of their norm", flush=True)


def print_row(name: str, own: float, other: float, unit: str, digits: str) -> None:
    ratio = f"{other / own:.2f}x" if own and other else ""
    print(f"{name:14}{own:9{digits}}{other:9{digits}} {unit:4}{ratio:>8}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--methods", choices=BETAS, nargs="+", default=list(BETAS))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    flags = parser.parse_args()
    rows = WORKLOADS[flags.workload].rows
    if any(rows % batch for batch in flags.batches):
        parser.error(f"--batches must divide the {rows} completions of {flags.workload}")
    return flags


def main() -> None:
    flags = parsed()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    workload = WORKLOADS[flags.workload]
    print(
        f"{flags.family}, {flags.workload}: {workload.rows} completions of {workload.prompts} "
        f"prompts, vocabulary {flags.vocabulary}, {flags.dtype}, {device()}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"{'':14}{'ours':>9}{'TRL':>9} {'':4}{'TRL/ours':>8}")
    with tempfile.TemporaryDirectory() as directory:
        shape = flags.vocabulary, flags.width, flags.layers, flags.family
        model = save_model(Path(directory), *shape)
        for method in flags.methods:
            job = Job(workload, method, model, flags.vocabulary, flags.dtype, directory)
            compare(job, flags.batches, flags.rounds)


if __name__ == "__main__":
    main()
