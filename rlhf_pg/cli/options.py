"""The options that commands have beside the keys of a config."""

import argparse
from typing import Any

from rlhf_pg.cli.keys import constant

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")  # as launchers' configs have them
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
    }.get(command)
    if add_options is not None:
        add_options(parser.add_argument_group("options"))
    return parser


def _plan(group: Any) -> None:
    add = group.add_argument
    add("--gpus", type=_count, default=1, metavar="N", help="number of processes, one per GPU")
    add(
        "--sharding",
        choices=SHARDINGS,
        default="ddp",
        help="how weights are split, as in the launcher's config",
    )
    devices = constant("plan.devices", "DEVICES")
    add("--device", choices=devices, help="GPU to estimate seconds for, beside TRL's and verl's")
    add("--memory", type=_positive, metavar="GB", help="memory of a GPU; default: this machine's")
    add(
        "--tflops",
        type=_positive,
        default=0.0,
        help="TFLOP/s of large matrix products; default: measured",
    )
    add(
        "--bandwidth",
        type=_positive,
        default=0.0,
        metavar="GB/S",
        help="memory bandwidth; default: measured",
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


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _at_least_0(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def _share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number
