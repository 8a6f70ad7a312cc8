"""`rlhf-pg demo` trains the embedded model and shows what it has learnt."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.cli.train import make_trainer
from rlhf_pg.config import GRPOConfig
from rlhf_pg.config.parse import parse, recipe_file
from rlhf_pg.trainers import PolicyGradientTrainer

# The recipe has 500 steps, and the learning rate falls over however many there are.
BRIEF = ("--output_dir", "runs/demo", "--max_steps", "300")


def demo(flags: Sequence[str]) -> None:
    """Train the embedded model with GRPO and show what it has learnt."""
    recipe = ["--config", str(recipe_file("grpo_arithmetic.yaml")), *BRIEF]
    trainer = make_trainer("grpo", parse(GRPOConfig, [*recipe, *flags], "rlhf-pg demo"))
    console = Console(quiet=not trainer.runtime.is_main)
    before, answers_before = trainer.evaluate(), _answers(trainer)
    console.print(Text(f"before: {_accuracy(before)}"))
    trainer.train()
    after, answers_after = trainer.evaluate(), _answers(trainer)
    if not trainer.runtime.is_main:
        return
    table = Table("problem", "before", "after")
    for problem, answer in answers_before.items():
        table.add_row(Text(problem), Text(answer), Text(answers_after[problem]))
    console.print(table)
    directory = Path(trainer.args.output_dir)
    console.print(Text(f"before: {_accuracy(before)}\nafter:  {_accuracy(after)}"))
    console.print(Text(f"model: {directory / 'final'}   report: {directory / 'report.html'}"))


def _accuracy(metrics: dict[str, float]) -> str:
    return f"{100 * metrics['eval_reward']:.1f} % of held-out problems right (sampled)"


def _answers(trainer: PolicyGradientTrainer, count: int = 8) -> dict[str, str]:
    """Sample one completion of each of a few held-out problems; return them by problem."""
    prompts = trainer.eval_sets[""]
    rows = range(0, len(prompts), max(1, len(prompts) // count))[:count]
    indices = [-1 - row for row in rows]
    samples = trainer.sample(prompts, list(rows), indices, 1, trainer.args.temperature)
    return dict(zip(prompts.rows[list(rows)]["prompt"], samples.completions, strict=True))
