"""`python -m tests.fuzz.run`: faults by chance, as many as there is time for.

The same seed gives the same cases. `--only reward` runs those of one kind, `--only 17` one of them,
and shows all that it said. A command that may take no longer than some minutes runs a part:
`--part 1/3`, `--part 2/3` and `--part 3/3` are all of them.
"""

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch
from transformers.utils.logging import disable_progress_bar

from tests.fuzz import configs, data, environments, rewards, servers
from tests.fuzz.case import Case
from tests.fuzz.verdict import Verdict, judged

KINDS: dict[str, ModuleType] = {
    "reward": rewards,
    "environment": environments,
    "server": servers,
    "config": configs,
    "dataset": data,
}


def case(seed: int, number: int) -> Case:
    """Kinds take turns, and so do the faults of a kind, in an order that the seed gives."""
    kinds = list(KINDS.values())
    turn, kind = divmod(number, len(kinds))
    drawn: Case = kinds[kind].draw(random.Random(f"{seed} {number}"), turn + 7 * seed)
    return drawn


def main() -> None:
    """Exits with 1 if a case is not as it should be."""
    options = _options()
    numbers = [
        number
        for number in range(options.cases)
        if _wanted(options.only, number) and number % options.part[1] == options.part[0] - 1
    ]
    disable_progress_bar()
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    deadline, bad, ran = time.monotonic() + 60 * options.minutes, 0, 0
    cases = [(number, case(options.seed, number)) for number in numbers]
    for verdict in judged(cases, place, options.workers):
        ran, bad = ran + 1, bad + (verdict.fault is not None)
        if verdict.fault or options.only:
            _show(verdict, place)
        if not verdict.fault:
            shutil.rmtree(place / f"case-{verdict.number}")
        if time.monotonic() > deadline:
            break
    print(f"{ran} of {len(cases)} cases of seed {options.seed}, {bad} not as they should be")
    if bad:
        print(f"what they left is in {place}")
    raise SystemExit(bad > 0)


def _show(verdict: Verdict, place: Path) -> None:
    print(f"{verdict.number} {verdict.case.kind}: {verdict.case.what} ({verdict.seconds:.1f} s)")
    print(f"    {verdict.fault or 'as it should be'}")
    print(f"    {verdict.ended[:600]!r}", flush=True)


def _wanted(only: str, number: int) -> bool:
    kind = list(KINDS)[number % len(KINDS)]
    return only in ("", kind, str(number))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--cases", type=int, default=200)
    add("--only", default="", metavar="KIND|NUMBER", help=f"{', '.join(KINDS)}, or one case")
    add("--minutes", type=float, default=10.0, help="no case begins after so many")
    add("--workers", type=int, default=2, help="cases at a time")
    add("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th case, from the I-th")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    one, of = map(int, text.split("/"))
    if not 1 <= one <= of:
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return one, of


if __name__ == "__main__":
    main()
