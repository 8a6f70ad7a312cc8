"""How much faster two processes are than one, by hand: one thread each, in turns in one run.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.scaling [--rounds 3] [--backend ddp]

Both take the same steps of GRPO on a model of 6.8M parameters; the figure is the ratio of their
median step times. Two free cores are assumed.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from rlhf_pg.tasks import arithmetic
from tests.benchmarks.ppo import model
from tests.distributed.backends import BACKENDS
from tests.distributed.launching import launch

STEPS, WARM = 6, 2  # steps of a run, and those that are not counted


def save_model(path: Path) -> str:
    """A random model, large enough that computing takes longer than anything else."""
    _, tokenizer = arithmetic().new_model()
    model(hidden=256, layers=8, vocabulary=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=BACKENDS, default="ddp")
    flags = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        job = {
            "algorithm": "grpo",
            "model": save_model(root / "model"),
            "prompts_per_step": 16,
            "num_generations": 8,
            "max_completion_length": 16,
            "max_steps": STEPS,
            "gradients": False,
        }
        for i in range(flags.rounds):
            for processes, backend in ((1, "ddp"), (2, flags.backend)):
                out = launch(root / f"{i}-{processes}", {"grpo": job}, backend, processes)
                steps = [line["step_time"] for line in out["grpo"].metrics[WARM:]]
                seconds[processes].append(statistics.median(steps))
                print(
                    f"round {i + 1}, {processes}: {seconds[processes][-1]:.3f} s/step", flush=True
                )
    one, two = (statistics.median(seconds[n]) for n in (1, 2))
    print(f"{flags.backend}: {one:.3f} s with one process, {two:.3f} s with two: {one / two:.2f}x")


if __name__ == "__main__":
    main()
