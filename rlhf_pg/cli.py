"""The `rlhf-pg` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

import rlhf_pg
from rlhf_pg import plan as planning
from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.fields import short_repr
from rlhf_pg.recipe import fail, load, parse, recipe_file
from rlhf_pg.report import save_curve, show_curve
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.rollout import RolloutError
from rlhf_pg.runtime import LAYOUTS
from rlhf_pg.streams import outliving_readers
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

SHARDINGS = {layout.name.replace("-", "").lower(): layout for layout in LAYOUTS}

USAGE = """\
rlhf-pg train RECIPE.yaml [--key value ...]   train with a recipe; flags override its keys (--help)
rlhf-pg train PRESET [--key value ...]        likewise, by the name of a preset: dapo, vapo ...
rlhf-pg plan --config RECIPE.yaml --gpus N    memory and seconds that it would take (plan --help)
rlhf-pg plan --config RECIPE.yaml --device h100   likewise of a GPU that is not here, on paper
rlhf-pg demo [--key value ...]                GRPO on the embedded task: a few minutes on a CPU
rlhf-pg --version"""


@outliving_readers()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="rlhf-pg", usage=USAGE, add_help=True)
    parser.add_argument("--version", action="version", version=rlhf_pg.__version__)
    parser.add_argument("command", choices=["train", "plan", "demo"])
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    flags = arguments[1:]
    disable_progress_bar()  # of loading and saving, which would break ours
    if not torch.accelerator.is_available():  # which DeepSpeed, where it is there, says in between
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if command == "train" and (not flags or flags[0].startswith("-")):
        parser.error("train needs a recipe: rlhf-pg train recipes/grpo_arithmetic.yaml")
    try:
        if command == "demo":
            demo(flags)
        elif command == "plan":
            plan(flags)
        else:
            train(_recipe(flags[0]), flags[1:])
    except (ValueError, RolloutError) as error:  # what the library says of it is enough
        fail(str(error))
    except KeyboardInterrupt:
        print(
            "interrupted: a run that had a step goes on with --resume_from_checkpoint latest",
            file=sys.stderr,
        )
        raise SystemExit(128 + signal.SIGINT) from None


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


def _algorithm(recipe: Path, others: Sequence[str] = ("sft", "reward_model")) -> str:
    """The key `algorithm`, which here is that of a trainer; elsewhere `others` are known, too."""
    algorithm = load(recipe).get("algorithm")
    if not isinstance(algorithm, str) or algorithm not in TRAINERS:
        known = ", ".join([*others, *TRAINERS])
        fail(f"{recipe}: the key algorithm must be one of {known}, got {short_repr(algorithm)}")
    return algorithm


# -------------------------------------------------------------------------------------------- plan


def plan(flags: Sequence[str]) -> None:
    """Show what a recipe would take on each process; no weights are loaded."""
    options, keys = _plan_options(flags)
    recipe = _recipe(options.config)
    args = _config(TRAINERS[_algorithm(recipe, ())].config_type, recipe, keys)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    room, kind = _room(device), device.type
    if options.device is not None:
        room, kind = planning.DEVICES[options.device].memory, "cuda"
    if options.memory is not None:
        room, kind = options.memory * 1e9, "cuda"
    drawn = planning.draw(args, device, kind, room if kind == "cuda" else None)
    layout = SHARDINGS[options.sharding]
    memory = planning.predicted_memory(drawn, layout, options.gpus, room, kind)
    console = Console()
    console.print(_memory_table(memory))
    if options.device is not None:
        job = planning.job_of(drawn, memory, layout, options.gpus)
        shape = planning.shape_of(drawn.policy.model)
        gpu = planning.DEVICES[options.device]._replace(memory=room)
        console.print(planning.paper_table(gpu, shape, job, drawn.critic is not None))
        console.print(Text(planning.said_beside(job)))
        return
    rates = planning.Rates(options.tflops * 1e12, options.bandwidth * 1e9)
    if not (options.tflops and options.bandwidth):
        here = planning.measured_rates(device, getattr(torch, args.dtype))
        rates = planning.Rates(rates.work or here.work, rates.bytes or here.bytes)
    console.print(_pace_table(planning.predicted_pace(drawn, memory, options.gpus), rates))
    console.print(Text(_assumptions(drawn, memory, rates)))


def _plan_options(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Those of the plan itself, and the keys of the recipe that are set."""
    parser = argparse.ArgumentParser(
        prog="rlhf-pg plan",
        allow_abbrev=False,
        epilog="Other flags are keys of the recipe, as in rlhf-pg train.",
    )
    add = parser.add_argument
    add("--config", required=True, help="a recipe, or the name of a preset")
    add("--gpus", type=_count, default=1, metavar="N", help="processes, one per GPU")
    add("--sharding", choices=SHARDINGS, default="ddp", help="what the launcher's config asks for")
    devices = planning.DEVICES
    add(
        "--device", choices=devices, help="whose seconds to work out on paper, beside TRL's, verl's"
    )
    add("--memory", type=_positive, metavar="GB", help="of a GPU; default: of this machine")
    add("--tflops", type=_positive, default=0.0, help="of large matrix products; default: measured")
    add("--bandwidth", type=_positive, default=0.0, metavar="GB/S", help="default: measured")
    options, keys = parser.parse_known_args(list(flags))
    if options.device and (options.tflops or options.bandwidth):
        parser.error("--device says what --tflops and --bandwidth would: give it alone")
    return options, keys


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _room(device: torch.device) -> float:
    """Bytes of the device, or those of a CPU's memory that a run takes by itself."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _memory_table(memory: planning.Memory) -> Table:
    totals = [sum(phase.values()) for phase in (memory.update, memory.rollout)]
    unit, name = (1e9, "GB") if max(totals) >= 1e9 else (1e6, "MB")
    table = Table(f"{name} on each process", "update", "rollout")
    for part in dict.fromkeys([*memory.update, *memory.rollout]):
        sizes = [phase.get(part, 0.0) for phase in (memory.update, memory.rollout)]
        if any(sizes):
            table.add_row(part, *(_short(size / unit) for size in sizes))
    table.add_row("total", *(_short(total / unit) for total in totals), style="bold")
    return table


def _pace_table(phases: dict[str, planning.Pace], rates: planning.Rates) -> Table:
    table = Table("a step", "TFLOP", "GB moved", "seconds", "share")
    whole = sum(pace.seconds(rates) for pace in phases.values())
    for phase, pace in phases.items():
        seconds = pace.seconds(rates)
        numbers = (pace.work / 1e12, pace.bytes / 1e9, seconds)
        table.add_row(phase, *map(_short, numbers), f"{100 * seconds / whole:.0f} %")
    table.add_row("total", "", "", _short(whole), "", style="bold")
    return table


def _assumptions(drawn: planning.Drawn, memory: planning.Memory, rates: planning.Rates) -> str:
    width = drawn.args.max_completion_length
    return (
        f"prompts of {drawn.prompt} and completions of {width} tokens, the most there may be; "
        f"micro_batch_tokens {memory.micro_batch_tokens}; {memory.rows} completions sampled at a "
        f"time; {_short(rates.work / 1e12)} TFLOP/s, {_short(rates.bytes / 1e9)} GB/s. Rewards, "
        "and exchanges between processes, are not in it."
    )


def _short(number: float) -> str:
    """Three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


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
