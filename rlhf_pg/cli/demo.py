"""`rlhf-pg demo`: train the embedded task, or a recipe, and show answers before and after."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.recipes import config_of, find_recipe, split_recipe
from rlhf_pg.data.chat import last_text
from rlhf_pg.report.evaluation import intervals
from rlhf_pg.trainers import PolicyGradientTrainer, trainer_type

# The recipe has 500 steps, and half of this rate, which decays over the actual number.
BRIEF = (
    "--output_dir",
    "runs/demo",
    "--max_steps",
    "300",
    "--learning_rate",
    "8e-4",
)


def demo(flags: Sequence[str]) -> None:
    """Train, and show held-out answers and scores before and after."""
    recipes, keys = split_recipe(flags)
    if not recipes:
        recipes = [find_recipe("grpo_arithmetic")]
        keys = [*BRIEF, *keys]
    args = config_of(recipes, keys, "demo")
    trainer = trainer_type(args.algorithm, args.trainer)(args=args)
    console = Console(quiet=not trainer.runtime.is_main)
    before = trainer.evaluate()
    answers_before = _answers(trainer)
    console.print(Text(f"before: {_reward_summary(before)}"))
    trainer.train()
    after = trainer.evaluate()
    answers_after = _answers(trainer)
    if not trainer.runtime.is_main:
        return
    table = Table("prompt", "before", "after", show_lines=True)
    for prompt, answer in answers_before.items():
        cells = [prompt, answer, answers_after[prompt]]
        table.add_row(*map(Text, map(visible, cells)))
    directory = Path(os.path.relpath(trainer.args.output_dir))
    scores = f"before: {_reward_summary(before)}\nafter:  {_reward_summary(after)}\n"
    files = f"model: {directory / 'final'}   report: {directory / 'report.html'}"
    console.print(table, Text(scores + files), sep="\n")


def _reward_summary(metrics: dict[str, float]) -> str:
    bounds = intervals(metrics).get("eval_reward")  # none for a single prompt
    interval = ""
    if bounds is not None:
        interval = "; 95 % interval {:.3f} to {:.3f}".format(*bounds)
    return f"held-out reward {metrics['eval_reward']:.3f} (sampled{interval})"


def _answers(trainer: PolicyGradientTrainer, count: int = 8) -> dict[str, str]:
    """Sample one completion of each of a few held-out prompts; return them by prompt."""
    prompts = next(iter(trainer.eval_sets.values()))
    rows = range(0, len(prompts), max(1, len(prompts) // count))[:count]
    ids = [-1 - row for row in rows]
    with trainer.sampler.sampling():
        samples = trainer.sampler.sample(prompts, list(rows), ids, 1, trainer.args.temperature)
    asked = map(last_text, prompts.rows[list(rows)]["prompt"])
    return dict(zip(asked, map(last_text, samples.completions), strict=True))
