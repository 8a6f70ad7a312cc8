"""The `rlhf-pg` command and its subcommands.

Each command imports slow modules itself, so that `--help` and errors in flags are immediate.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rlhf_pg
from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.quoted import frames, tell
from rlhf_pg.boundary.terminal import escape_warnings, say
from rlhf_pg.cli.options import USAGE, parser_of
from rlhf_pg.config.parse import fail, help_on_keys, load

# Files of commands if their names differ, and commands that load no model.
FILES = {"eval": "evaluate", "compare": "report", "diff": "report"}
LIGHT = ("doctor", "diff", "report", "compare", "train")  # `train` once its config is right
HELP = ("-h", "--help")


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
    first, *flags = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = parser.parse_args([first]).command
    with explaining_errors(command):
        if {*HELP} & set(flags):
            say(help_of(command, flags))
            raise SystemExit(0)
        if command not in LIGHT:
            quiet_libraries()
        module = importlib.import_module(f"rlhf_pg.cli.{FILES.get(command, command)}")
        try:
            getattr(module, "evaluate" if command == "eval" else command)(flags)
        finally:
            user_modules.forget()


def quiet_libraries() -> None:
    """Keep libraries from printing into our lines."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # when loading and saving


@contextmanager
def explaining_errors(command: str = "train") -> Iterator[None]:
    """Print a user's error without our frames, and exit; with RLHF_PG_DEBUG=1, raise it."""
    escape_warnings()
    try:
        yield
    except KeyboardInterrupt:
        resume = ": if a step was finished, resume with --resume_from_checkpoint latest"
        print(f"interrupted{resume if command in ('train', 'demo') else ''}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # the reader has closed the pipe, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        trace = frames(error)
        is_ours = type(error).__module__.startswith("rlhf_pg.")
        says_enough = (
            trace or is_ours or isinstance(error, ValueError | OSError | FloatingPointError)
        )
        if os.environ.get("RLHF_PG_DEBUG") or not says_enough:
            raise
        message = f"{tell(error)}{trace}" if trace else str(error)
        if isinstance(error, OSError) and command in ("report", "compare"):
            message += ": write it elsewhere with --out"
        fail("\n".join([message, *getattr(error, "__notes__", ())]))


def help_of(command: str, flags: Sequence[str]) -> str:
    """Return the usage of a command, its options, and the keys of its config."""
    parser = parser_of(command)
    if command not in ("train", "preview", "plan", "audit", "eval", "demo"):
        return parser.format_help().strip()
    from rlhf_pg.cli import recipes
    from rlhf_pg.config import PolicyGradientConfig

    about = f"{parser.description} Every key of a recipe is a flag as well, and flags win."
    words = [flag for flag in flags if flag not in HELP]
    if command == "eval" and words and not recipes.is_recipe(words[0]):
        words = words[1:]  # a model
    elif command == "demo" and not words:
        words = ["grpo_arithmetic"]
    files, others = recipes.split_recipe(words)
    if files:
        kind = recipes.config_type_of(files, others, recipes.CONFIGS)
        keys = help_on_keys(kind, {k: v for file in files for k, v in load(file).items()})
    else:
        about += (
            f" Below are the keys that all algorithms have; `rlhf-pg {command} PRESET --help` "
            f"shows those of one. Presets: {', '.join(recipes.presets())}."
        )
        keys = help_on_keys(PolicyGradientConfig)
    parser.description = about
    return f"{parser.format_help().strip()}\n\n{keys}"
