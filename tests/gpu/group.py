"""One group of checks in a process of its own, which tells of each as soon as it is known.

    python -m tests.gpu.group tests.gpu.groups NAME --device cuda --first 0 --lines FILE

An error in a check is a failed row, and the next check follows. After one that leaves the device
unusable (an illegal access poisons the context of its process) the process ends, and whoever
started it starts another, with `--first` behind the check that did it.
"""

import argparse
import importlib
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.check import Check, Result
from tests.gpu.report import ROOT, Row

Tell = Callable[[dict[str, Any]], None]


def go(name: str, checks: Iterator[Check], first: int, tell: Tell, pattern: str = "") -> None:
    """Make the checks from number `first` on, of those whose names have the regular expression;
    tell what begins, its row, and when all are done.
    """
    number = 0
    while True:
        start = time.perf_counter()
        try:
            what, check = next(checks)
        except StopIteration:
            break
        except Exception as error:  # in what prepares the next check: there is no going on
            result, what = failed(error), "preparing the checks"
            tell({"row": row(name, what, result, start)})
            break
        if not re.search(pattern, what):
            continue
        number += 1
        if number <= first:
            continue
        tell({"begins": what})
        result, usable = made(check)
        tell({"row": row(name, what, result, start)})
        if not usable:
            return
    tell({"done": True})


def made(check: Callable[[], Result]) -> tuple[Result, bool]:
    """The result of a check, and whether the device can still be used."""
    try:
        return check(), True
    except torch.AcceleratorError as error:
        return failed(error), False
    except (Exception, SystemExit) as error:  # by which the command line reports bad input
        return failed(error), True


def failed(error: BaseException) -> Result:
    """The first line of an error, and where in this repository it came up; the rest to the log."""
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(ROOT) and ".venv" not in f.filename]
    frame = own[-1] if own else frames[-1]
    path = Path(frame.filename)
    place = path.relative_to(ROOT) if own else path.name
    first = (str(error).splitlines() or [""])[0]
    return Result(f"{type(error).__name__}: {first[:200]} ({place}:{frame.lineno})", False)


def row(group: str, what: str, result: Result, start: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - start, 2)
    finite = result.value is not None and math.isfinite(result.value)  # JSON knows no other numbers
    value = result.value if finite else None
    return asdict(Row(group, what, result.figure, value, result.passed, seconds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", help="the module that has them")
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--check", default="")
    flags = parser.parse_args()
    group = importlib.import_module(flags.groups).GROUPS[flags.name]
    with flags.lines.open("a", buffering=1) as lines:
        tell = partial(print, file=lines)
        checks = group.checks(flags.device)
        go(flags.name, checks, flags.first, lambda e: tell(json.dumps(e)), flags.check)


if __name__ == "__main__":
    main()
