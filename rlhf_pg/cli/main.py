"""The `rlhf-pg` command and its subcommands."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch
from transformers.utils.logging import disable_progress_bar

import rlhf_pg
from rlhf_pg.boundary.streams import outliving_readers
from rlhf_pg.cli.demo import demo
from rlhf_pg.cli.plan import plan
from rlhf_pg.cli.train import find_recipe, train
from rlhf_pg.config.parse import fail
from rlhf_pg.rollout import RolloutError

USAGE = """\
rlhf-pg train RECIPE.yaml [--key value ...]   train with a recipe; flags override its keys (--help)
rlhf-pg train PRESET [--key value ...]        train with a preset by its name: dapo, vapo ...
rlhf-pg plan --config RECIPE.yaml --gpus N    estimate memory and seconds per step (plan --help)
rlhf-pg plan --config RECIPE.yaml --device h100   estimate them for a GPU that is not here
rlhf-pg demo [--key value ...]                train with GRPO on a CPU: a few minutes
rlhf-pg --version"""


@outliving_readers()
def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand; exit with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="rlhf-pg", usage=USAGE, add_help=True)
    parser.add_argument("--version", action="version", version=rlhf_pg.__version__)
    parser.add_argument("command", choices=["train", "plan", "demo"])
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    flags = arguments[1:]
    disable_progress_bar()  # bars of loading and saving would break ours
    if not torch.accelerator.is_available():  # or DeepSpeed would print a line
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if command == "train" and (not flags or flags[0].startswith("-")):
        parser.error("train needs a recipe: rlhf-pg train recipes/grpo_arithmetic.yaml")
    try:
        if command == "demo":
            demo(flags)
        elif command == "plan":
            plan(flags)
        else:
            train(find_recipe(flags[0]), flags[1:])
    except (ValueError, RolloutError) as error:  # a traceback would add nothing
        fail("\n".join([str(error), *getattr(error, "__notes__", ())]))
    except KeyboardInterrupt:
        print(
            "interrupted: if a step was finished, resume with --resume_from_checkpoint latest",
            file=sys.stderr,
        )
        raise SystemExit(128 + signal.SIGINT) from None
