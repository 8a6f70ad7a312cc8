"""A process that compares mathematical answers for the trainer; run as a script.

Reads a JSON object per line, {"golds", "answer", "boxed", "seconds"}, and answers with a line:
true, false, or null if no gold can be parsed. SymPy may compute for ages, and in C, where no
exception reaches it: a timer's signal then ends the process, and its caller starts another.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes
LATEX = re.compile(r"\\boxed|\\\(|\\\[|\$[^$]+\$")


def main() -> None:
    """Answer line by line, until there is none."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends its input
    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401, before a timer runs

    for line in sys.stdin:
        pair = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, pair["seconds"])
        verdict = compare(pair["golds"], pair["answer"], pair["boxed"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=said, flush=True)


def compare(golds: list[str], answer: str, boxed: bool) -> bool | None:
    """Return whether an answer is one of the golds; None if none of these can be parsed."""
    from math_verify import verify

    rights = [right for gold in golds if (right := parse_gold(gold))]
    if not rights:
        return None
    try:
        said = parse(answer.replace("\u2212", "-"), boxed)
        return any(verify(right, said, timeout_seconds=None) for right in rights)
    except (Exception, RecursionError, MemoryError):
        return False


@lru_cache(maxsize=256)
def parse_gold(gold: str) -> list[Any]:
    """Parse a truth: an expression alone, a solution with its answer boxed, or behind `####`."""
    gold = gold.rpartition("####")[2].strip().replace("\u2212", "-")
    try:
        right = parse(gold, False) if LATEX.search(gold) else []
        return right or parse(f"\\boxed{{{gold}}}", True)
    except (Exception, RecursionError, MemoryError):
        return []


def parse(text: str, boxed: bool) -> list[Any]:
    """Return what math-verify finds in a text, `\\boxed{}` before all else; or only in that."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify import parse as find

    if boxed and "\\boxed{" not in text:
        return []
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    kinds = [latex] if boxed else [latex, ExprExtractionConfig()]
    return list(find(text, kinds, parsing_timeout=None))


if __name__ == "__main__":
    main()
