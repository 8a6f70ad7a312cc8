"""The `rlhf-pg` command and its subcommands.

Whatever takes seconds to import is imported by the command that needs it, so that `--help` and a
mistyped flag answer at once.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import rlhf_pg
from rlhf_pg.cli.help import COMMANDS, USAGE, help_of
from rlhf_pg.cli.recipes import needed_recipe
from rlhf_pg.config.parse import fail


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand; exit with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="rlhf-pg",
        usage="rlhf-pg COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=COMMANDS,
    )
    parser.add_argument("--version", action="version", version=rlhf_pg.__version__)
    parser.add_argument("command", choices=list(USAGE), metavar="COMMAND")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        raise SystemExit(0)
    command = parser.parse_args(arguments[:1]).command
    flags = arguments[1:]
    if {"-h", "--help"} & set(flags):
        print(help_of(command, flags))
        raise SystemExit(0)
    try:
        run(command, flags)
    except KeyboardInterrupt:
        resume = ": if a step was finished, resume with --resume_from_checkpoint latest"
        print(f"interrupted{resume if command in ('train', 'demo') else ''}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # the reader has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        if not _says_all(error):
            raise
        fail("\n".join([str(error), *getattr(error, "__notes__", ())]))


def run(command: str, flags: Sequence[str]) -> None:
    """Import a subcommand and run it."""
    match command:
        case "train" | "plan":
            recipe, keys = needed_recipe(command, flags)
            _quieten()
            if command == "train":
                from rlhf_pg.cli.train import train as called
            else:
                from rlhf_pg.cli.plan import plan as called
            called(recipe, keys)
        case "eval":
            _quieten()
            from rlhf_pg.cli.evaluate import evaluate

            evaluate(flags)
        case "replay":
            _quieten()
            from rlhf_pg.cli.replay import replay

            replay(flags)
        case "chat":
            _quieten()
            from rlhf_pg.cli.chat import chat

            chat(flags)
        case "demo":
            _quieten()
            from rlhf_pg.cli.demo import demo

            demo(flags)
        case "fetch":
            _quieten()
            from rlhf_pg.cli.fetch import fetch

            fetch(flags)
        case "doctor":
            from rlhf_pg.cli.doctor import doctor

            doctor(flags)
        case "diff":
            from rlhf_pg.cli.diff import diff

            diff(flags)
        case "report" | "compare":
            from rlhf_pg.cli import report

            getattr(report, command)(flags)


def _quieten() -> None:
    """Keep libraries from printing what would break our own lines."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # bars of loading and saving
    if not torch.accelerator.is_available():  # or DeepSpeed would print a line
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _says_all(error: Exception) -> bool:
    """Return whether a traceback would add nothing to an error's message."""
    if isinstance(error, ValueError):
        return True
    from rlhf_pg.rollout.engine import RolloutError

    return isinstance(error, RolloutError)
