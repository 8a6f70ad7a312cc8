"""The options that commands have beside the keys of a config."""

import argparse
import re
from typing import Any

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")  # as launchers' configs have them
# Memory of GPUs in GiB, as their makers state it.
GPUS = {"h100": 80, "h200": 141, "b200": 180, "a100": 80, "l40s": 48, "h20": 96}
DTYPES = ("float32", "bfloat16", "float64")


def parser_of(command: str, usage: str) -> argparse.ArgumentParser:
    """Return the parser of a command's own options; a command without any has an empty one."""
    parser = argparse.ArgumentParser(
        prog=f"rlhf-pg {command}", usage=usage, allow_abbrev=False, add_help=False
    )
    add_options = {
        "plan": _plan,
        "eval": _eval,
        "report": _report,
        "compare": _compare,
        "replay": _replay,
        "diff": _diff,
        "chat": _chat,
        "doctor": _doctor,
        "fetch": _fetch,
    }.get(command)
    if add_options is not None:
        add_options(parser.add_argument_group("options"))
    return parser


def _plan(group: Any) -> None:
    add = group.add_argument
    add("--num_processes", type=_count, default=1, metavar="N", help="one per GPU")
    add(
        "--sharding",
        choices=SHARDINGS,
        default="ddp",
        help="how weights are split, as in the launcher's config",
    )
    add(
        "--device",
        type=_device,
        metavar="GPU",
        help=f"{', '.join(GPUS)}, or memory in GiB; default: this machine's",
    )


def _eval(group: Any) -> None:
    add = group.add_argument
    add("--config", metavar="RECIPE", help="recipe file, or the name of a preset, to take keys of")
    add("--json", metavar="FILE", help="write the numbers to a file too")


def _chat(group: Any) -> None:
    add = group.add_argument
    add("--system_prompt", metavar="TEXT", help="system message in front of the chat")
    add("--temperature", type=_at_least_0, default=1.0, help="0 is greedy (default: 1)")
    add("--top_p", type=_share, default=1.0, help="mass of the likeliest tokens (default: 1)")
    add("--top_k", type=_number, default=0, help="number of the likeliest tokens; 0 is all")
    add("--max_completion_length", type=_count, default=512, help="tokens of an answer (512)")
    add("--seed", type=_number, default=42, help="seed of the sampling noise (default: 42)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add(
        "--trust_remote_code",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        help="run code that comes with the model",
    )


def _doctor(group: Any) -> None:
    group.add_argument(
        "--json", type=_boolean, nargs="?", const=True, default=False, help="print JSON"
    )


def _fetch(group: Any) -> None:
    group.add_argument("model", choices=("smollm2",), help="SmolLM2-135M-Instruct, 93 MB")
    group.add_argument("--out", metavar="DIRECTORY", help="default: models/MODEL")


def _report(group: Any) -> None:
    group.add_argument("--out", metavar="FILE", help="default: report.html in the run's directory")


def _compare(group: Any) -> None:
    group.add_argument(
        "--out", metavar="FILE", default="compare.html", help="the page (default: compare.html)"
    )


def _replay(group: Any) -> None:
    add = group.add_argument
    add("--step", type=_count, required=True, metavar="N", help="step to make again, from 1")
    add("--rows", type=_number, nargs="+", metavar="N", help="rows to show token by token, from 0")
    add("--resample", action="store_true", help="sample and score again, where nobody is asked")


def _diff(group: Any) -> None:
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument(
        "--rtol",
        type=_at_least_0,
        default=0.0,
        metavar="X",
        help="count numbers as equal within this share of the largest of their kind (default: 0, "
        "bit by bit)",
    )


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _number(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def _device(text: str) -> float:
    """Return the bytes of a GPU, by its name or its GiB."""
    if text.lower() not in GPUS and not re.fullmatch(r"\d*\.?\d+", text):
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(GPUS)} or GiB, got {text}")
    return float(GPUS.get(text.lower()) or text) * 2**30


def _at_least_0(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def _share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number
