"""A run that is killed again and again, beside one that is not: both must end the same.

    python -m tests.faults.soak --steps 24000 --kills 45

trains a small GRPO run that saves after every step, once undisturbed and once with signals at
random moments (three of four SIGKILL, the others SIGTERM), each followed by a resume from the
newest checkpoint. It prints a line per signal, and fails unless the final weights have the same
SHA-256 and `metrics.jsonl` the same numbers, times aside.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.job import build, left

STARTING = 8.0  # seconds: imports, and the checkpoint that is read
JOB = "--job"


def job(out: Path, steps: int) -> None:
    """The run, from wherever it is."""
    saved = any((out / "checkpoints").glob("step-*"))
    trainer = build(str(out), max_steps=steps, eval_steps=0, beta=0.02, log_completions_steps=0)
    trainer.train(resume_from_checkpoint="latest" if saved else None)


def started(out: Path, steps: int) -> "subprocess.Popen[bytes]":
    log = (out.parent / f"{out.name}.log").open("ab")
    command = [sys.executable, "-m", "tests.faults.soak", JOB, str(out), str(steps)]
    return subprocess.Popen(command, stdout=log, stderr=log)


def newest(out: Path) -> str:
    return max(
        (path.name for path in (out / "checkpoints").glob("step-*")), default="no checkpoint"
    )


def disturb(out: Path, steps: int, kills: int, seconds: float) -> int:
    """Run to the end through so many signals; returns how many came.

    Args:
        seconds: that the run takes undisturbed.
    """
    mean = STARTING + 0.7 * seconds / kills  # which leaves some of it for the end
    chance, count, begun = random.Random(0), 0, time.monotonic()
    while True:
        process = started(out, steps)
        wait = chance.uniform(0.5 * STARTING, 2 * mean - 0.5 * STARTING)
        try:
            code = process.wait(wait if count < kills else None)
            if code != 0:
                raise SystemExit(f"the run failed by itself, with {code}: see {out}.log")
            return count
        except subprocess.TimeoutExpired:
            pass
        number = chance.choice([signal.SIGKILL] * 3 + [signal.SIGTERM])
        process.send_signal(number)
        code, count = process.wait(), count + 1
        if code not in (-number, 128 + number):
            raise SystemExit(f"the run ended with {code} after {number.name}: see {out}.log")
        print(
            f"{time.monotonic() - begun:6.0f} s  {count:3} {number.name} after {wait:4.1f} s, "
            f"exit {code}, newest {newest(out)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10000)
    flags = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    whole, broken = directory / "whole", directory / "broken"
    begun = time.monotonic()
    if started(whole, flags.steps).wait() != 0:
        raise SystemExit(f"the undisturbed run failed: see {whole}.log")
    took = time.monotonic() - begun
    print(f"{flags.steps} steps undisturbed: {took:.0f} s", flush=True)
    count = disturb(broken, flags.steps, flags.kills, took)
    if count < flags.kills:
        raise SystemExit(f"it ended after {count} signals: raise --steps")
    (weights, lines), (other_weights, other_lines) = left(whole), left(broken)
    assert lines == other_lines, "the metrics differ"
    assert weights == other_weights, "the weights differ"
    print(
        f"{count} signals in {(time.monotonic() - begun) / 60:.0f} minutes: the same metrics, and "
        f"the same weights, SHA-256 {weights}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [JOB]:
        job(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
