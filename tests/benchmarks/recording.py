"""The cost of what a run keeps of each step: seconds and bytes.

    python -m tests.benchmarks.recording [RECIPE] [--key value ...]

One trainer takes steps in turn without a record, with a trace, and with completions and tokens too.
"""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from rlhf_pg.cli.recipes import algorithm_of, find_recipe
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import parse
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import Meter

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
        for step in range(3 * ROUNDS + 3):
            way = WAYS[step % 3]
            trainer.journal = None if way == "nothing" else journal
            trainer._is_shown = lambda _, way=way: way == WAYS[2]  # type: ignore[method-assign]
            meter = Meter()
            trainer.step(meter)
            if step >= 3:
                seconds[way].append(meter.age)
        _report(seconds, Path(directory), trainer.args.prompts_per_step * args.num_generations)


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
