"""The `rlhf-pg` command."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

import rlhf_pg
from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.recipe import fail, load, parse, recipe_file
from rlhf_pg.report import save_curve, show_curve
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.tasks import TASKS
from rlhf_pg.tasks.warm_start import ensure_model, warm_start
from rlhf_pg.trainers import (
    GRPOTrainer,
    PolicyGradientTrainer,
    PPOTrainer,
    ReinforceTrainer,
    RLOOTrainer,
)

C = TypeVar("C")

TRAINERS: dict[str, type[PolicyGradientTrainer]] = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "rloo": RLOOTrainer,
    "reinforce": ReinforceTrainer,
}

USAGE = """\
rlhf-pg train RECIPE.yaml [--key value ...]   train with a recipe; flags override its keys (--help)
rlhf-pg train PRESET [--key value ...]        likewise, by the name of a preset: dapo, vapo ...
rlhf-pg demo [--key value ...]                GRPO on the embedded task: a few minutes on a CPU
rlhf-pg --version"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="rlhf-pg", usage=USAGE, add_help=True)
    parser.add_argument("--version", action="version", version=rlhf_pg.__version__)
    parser.add_argument("command", choices=["train", "demo"])
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    flags = arguments[1:]
    disable_progress_bar()  # of loading and saving, which would break ours
    if command == "train" and (not flags or flags[0].startswith("-")):
        parser.error("train needs a recipe: rlhf-pg train recipes/grpo_arithmetic.yaml")
    try:
        if command == "demo":
            demo(flags)
        else:
            train(_recipe(flags[0]), flags[1:])
    except ValueError as error:  # what the library says of bad input is enough
        fail(str(error))


def train(recipe: Path, flags: Sequence[str]) -> None:
    """Do what a recipe file asks for by its key `algorithm`."""
    algorithm = load(recipe).get("algorithm")
    if algorithm == "sft":
        print(f"saved {warm_start(_config(SFTConfig, recipe, flags))}")
    elif algorithm == "reward_model":
        make_reward_model(_config(RewardModelConfig, recipe, flags))
    else:
        make_trainer(recipe, flags).train()


def _recipe(name: str) -> Path:
    """The file of this name, or else the preset."""
    preset = recipe_file(f"presets/{name}.yaml")
    return preset if preset.exists() and not Path(name).exists() else Path(name)


def make_reward_model(args: RewardModelConfig) -> None:
    """Train a reward model on the pairs of its task."""
    pairs, held_out = TASKS[args.task]().pairs()
    train_reward_model(
        args,
        model=ensure_model(args.task, args.model_name_or_path),
        train_dataset=pairs,
        eval_dataset=held_out,
    )


def make_trainer(recipe: Path, flags: Sequence[str]) -> PolicyGradientTrainer:
    """The trainer that a recipe file asks for by its key `algorithm`, on its task."""
    trainer_type = TRAINERS[_algorithm(recipe)]
    args = _config(trainer_type.config_type, recipe, flags)
    task = TASKS[args.task]()
    return trainer_type(
        model=ensure_model(args.task, args.model_name_or_path),
        reward_funcs=task.rewards(args.reward_model_name_or_path),
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )


def _config(config_type: type[C], recipe: Path, flags: Sequence[str]) -> C:
    return parse(config_type, ["--config", str(recipe), *flags], f"rlhf-pg train {recipe}")


def _algorithm(recipe: Path) -> str:
    algorithm = str(load(recipe).get("algorithm"))
    if algorithm not in TRAINERS:
        known = ", ".join(["sft", "reward_model", *TRAINERS])
        fail(f"{recipe}: the key algorithm must be one of {known}, got {algorithm!r}")
    return algorithm


# -------------------------------------------------------------------------------------------- demo


def demo(flags: Sequence[str]) -> None:
    """Train the embedded model with GRPO, and show what it has learnt."""
    if not (find_spec("plotext") and find_spec("matplotlib")):
        fail('the demo draws curves: pip install "rlhf-pg[report]"')
    trainer = make_trainer(
        recipe_file("grpo_arithmetic.yaml"), ["--output_dir", "runs/demo", *flags]
    )
    console = Console(quiet=not trainer.runtime.is_main)
    before, answers_before = trainer.evaluate(), _answers(trainer)
    console.print(Text(f"before: {_accuracy(before)}"))
    trainer.train()
    after, answers_after = trainer.evaluate(), _answers(trainer)
    if not trainer.runtime.is_main:
        return
    table = Table("problem", "before", "after")
    for problem, early, late in zip(_problems(trainer), answers_before, answers_after, strict=True):
        table.add_row(Text(problem), Text(early), Text(late))
    console.print(table)
    directory = Path(trainer.args.output_dir)
    show_curve(directory)
    console.print(Text(f"before: {_accuracy(before)}\nafter:  {_accuracy(after)}"))
    console.print(Text(f"model: {directory / 'final'}   curve: {save_curve(directory)}"))


def _accuracy(metrics: dict[str, float]) -> str:
    return f"{100 * metrics['eval_reward']:.1f} % of held-out problems right (sampled)"


def _rows(trainer: PolicyGradientTrainer, count: int = 8) -> list[int]:
    assert trainer.eval_prompts is not None
    size = len(trainer.eval_prompts)
    return list(range(0, size, max(1, size // count)))[:count]


def _problems(trainer: PolicyGradientTrainer) -> list[str]:
    assert trainer.eval_prompts is not None
    problems: list[str] = trainer.eval_prompts.rows[_rows(trainer)]["prompt"]
    return problems


def _answers(trainer: PolicyGradientTrainer) -> list[str]:
    """One sampled completion of a few held-out problems."""
    assert trainer.eval_prompts is not None
    rows, temperature = _rows(trainer), trainer.args.temperature
    draws = [-1 - row for row in rows]
    return trainer.sample(trainer.eval_prompts, rows, draws, 1, temperature).completions


if __name__ == "__main__":
    main()
