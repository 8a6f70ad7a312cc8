"""The cost of what a run keeps of each step: seconds and bytes.

    python -m tests.benchmarks.recording [RECIPE] [--key value ...]

One trainer takes steps in turn without a record, with a trace, and with completions and tokens too:
medians of whole steps, which differ by the machine's mood too, and of the time within them that is
spent on the record.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rlhf_pg.cli.recipes import algorithm_of, find_recipe
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import parse
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import Meter
from rlhf_pg.trainers import PolicyGradientTrainer

WAYS = ("nothing", "trace", "trace, completions and tokens")
ROUNDS = 15


def main() -> None:
    torch.set_num_threads(1)
    name, *flags = sys.argv[1:] or ["grpo_arithmetic"]
    recipe = find_recipe(name)
    kind = TRAINERS[algorithm_of(recipe, TRAINERS)]
    with tempfile.TemporaryDirectory() as directory:
        more = ["--output_dir", directory, "--max_steps", "1000"]
        args = parse(kind.config_type, ["--config", str(recipe), *flags, *more])
        trainer = kind(args=args)
        journal = Journal(Path(directory), 0, is_main=True)
        journal.console.quiet = True
        seconds: dict[str, list[float]] = defaultdict(list)
        shares: dict[str, list[float]] = defaultdict(list)
        spent = _timed(trainer)
        for step in range(3 * ROUNDS + 3):
            way = WAYS[step % 3]
            trainer.journal = None if way == "nothing" else journal
            trainer.args.log_completions_steps = int(way == WAYS[2])
            meter = Meter()
            spent.clear()
            trainer.step(meter)
            if step >= 3:
                seconds[way].append(meter.age)
                shares[way].append(sum(spent) / meter.age)
        for way in WAYS[1:]:
            print(f"{way}: {100 * median(shares[way]):.2f} % of a step is spent on it")
        _report(seconds, Path(directory), trainer.args.prompts_per_step * args.num_generations)


def _timed(trainer: PolicyGradientTrainer) -> list[float]:
    """Time the calls of a trainer that record a step; return the list that the times go into."""
    spent: list[float] = []

    def timed(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            begun = time.perf_counter()
            function(*arguments)
            spent.append(time.perf_counter() - begun)

        return call

    for name in ("_begin_record", "_watch_update", "_keep_record"):
        setattr(trainer, name, timed(getattr(trainer, name)))
    return spent


def _report(seconds: dict[str, list[float]], directory: Path, rows: int) -> None:
    base = median(seconds[WAYS[0]])
    for way in WAYS:
        own = median(seconds[way])
        print(f"{way}: {own:.4f} s a step, {100 * (own / base - 1):+.1f} %")
    every10 = (9 * median(seconds[WAYS[1]]) + median(seconds[WAYS[2]])) / 10
    print(f"log_completions_steps 10: {100 * (every10 / base - 1):+.1f} %")
    steps = 2 * (ROUNDS + 1)
    trace = (directory / "trace.jsonl").stat().st_size / steps / rows
    kept = (directory / "completions.jsonl").stat().st_size / (steps / 2) / rows
    tokens = [path.stat().st_size for path in (directory / "tokens").iterdir()]
    print(
        f"bytes a completion: trace {trace:.0f}; where it is kept, text {kept:.0f} and tokens "
        f"{sum(tokens) / len(tokens) / rows:.0f}"
    )


if __name__ == "__main__":
    main()
