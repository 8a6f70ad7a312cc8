"""The `rlhf-pg` command and its subcommands.

Whatever takes seconds to import is imported by the command that needs it, so that `--help` and a
mistyped flag answer at once.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import rlhf_pg
from rlhf_pg.cli.options import USAGE

# Files of commands that have another name than theirs, and commands that load no model.
FILES = {"eval": "evaluate", "compare": "report", "diff": "report"}
LIGHT = ("doctor", "diff", "report", "compare")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand; exit with status 2 on wrong usage."""
    listed = (f"  {f'{name} {form}':43} {what}" for name, (form, what) in USAGE.items())
    parser = argparse.ArgumentParser(
        prog="rlhf-pg",
        usage="rlhf-pg COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["commands (rlhf-pg COMMAND --help says more):", *listed]),
    )
    parser.add_argument("--version", action="version", version=rlhf_pg.__version__)
    parser.add_argument("command", choices=list(USAGE), metavar="COMMAND")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        raise SystemExit(0)
    command = parser.parse_args(arguments[:1]).command
    flags = arguments[1:]
    try:
        if {"-h", "--help"} & set(flags):
            from rlhf_pg.cli.help import help_of

            print(help_of(command, flags), flush=True)
            raise SystemExit(0)
        if command not in LIGHT:
            _quieten()
        module = importlib.import_module(f"rlhf_pg.cli.{FILES.get(command, command)}")
        getattr(module, "evaluate" if command == "eval" else command)(flags)
    except KeyboardInterrupt:
        resume = ": if a step was finished, resume with --resume_from_checkpoint latest"
        print(f"interrupted{resume if command in ('train', 'demo') else ''}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # the reader has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        from rlhf_pg.config.parse import fail
        from rlhf_pg.rollout.engine import RolloutError

        if not isinstance(error, ValueError | RolloutError):  # whose messages say all
            raise
        fail("\n".join([str(error), *getattr(error, "__notes__", ())]))


def _quieten() -> None:
    """Keep libraries from printing what would break our own lines."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # bars of loading and saving
    if not torch.accelerator.is_available():  # or DeepSpeed would print a line
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
