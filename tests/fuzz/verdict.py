"""What came of a case: whether what happened is what a user may ask for."""

import json
import linecache
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import rlhf_pg
from rlhf_pg.checkpoint import atomic
from rlhf_pg.report.json_lines import read
from rlhf_pg.rollout import RolloutError
from tests.fuzz.case import Case, Counting

PATIENCE = 90  # seconds that a case may take: a hundred times what it does on an idle machine
LONGEST = 3000  # characters of an error
OWN = str(Path(rlhf_pg.__file__).parent)


@dataclass
class Verdict:
    """Of one case; `fault` is None if all is well."""

    number: int
    case: Case
    ended: str
    fault: str | None
    seconds: float


def judged(cases: Sequence[tuple[int, Case]], place: Path, workers: int) -> Iterator[Verdict]:
    """Run cases, each in a fork, several at a time; in the order in which they end."""
    waiting, running = list(reversed(cases)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, case = waiting.pop()
            directory = place / f"case-{number}"
            directory.mkdir(parents=True)
            process = get_context("fork").Process(target=_child, args=(case, directory))
            process.start()
            running[number] = case, directory, process, time.monotonic()
        time.sleep(0.02)
        for number, (case, directory, process, since) in list(running.items()):
            took = time.monotonic() - since
            if process.is_alive() and took < PATIENCE:
                continue
            del running[number]
            ended, fault = _verdict(case, directory, process)
            yield Verdict(number, case, ended, fault, took)


def _child(case: Case, directory: Path) -> None:
    log = (directory / "log").open("w", buffering=1, errors="surrogateescape")
    sys.stdout = sys.stderr = log
    outcome: dict[str, Any] = {"ended": "done"}
    try:
        trainer = case.run(directory / "run")
        trainer.callbacks.append(Counting(directory / "steps"))
        trainer.train()
    except BaseException as error:
        outcome = _outcome(error)
    (directory / "outcome").write_text(json.dumps(outcome))


def _outcome(error: BaseException) -> dict[str, Any]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    try:
        text = str(error)
    except Exception:
        text = ""
    return {
        "ended": "exit" if isinstance(error, SystemExit) else "error",
        "code": getattr(error, "code", None),
        "type": type(error).__name__,
        "text": text,
        "meant": isinstance(error, ValueError | TypeError | RolloutError)
        and file.startswith(OWN)
        and linecache.getline(file, line).lstrip().startswith("raise"),
        "where": f"{file}:{line}",
    }


def _verdict(case: Case, directory: Path, process: Any) -> tuple[str, str | None]:
    if process.is_alive():
        process.kill()
        process.join()
        return "hangs", f"no end within {PATIENCE} s"
    process.join()
    if not (directory / "outcome").exists():
        return "gone", f"it ended without a word, with {process.exitcode}"
    outcome = json.loads((directory / "outcome").read_text())
    ended = outcome["ended"]
    if ended == "done":
        whole = atomic.verified(directory / "run" / "final")
        return ended, _lost(directory) or (whole and f"final/: {whole}")
    if ended == "exit":
        outcome["text"] = (directory / "log").read_text(errors="replace")
        outcome["meant"] = outcome["code"] == 2 and "Traceback" not in outcome["text"]
    said = f"{outcome['type']} at {outcome['where']}: {outcome['text'][-LONGEST:]}"
    return said, _bad_error(case, outcome) or _lost(directory)


def _bad_error(case: Case, outcome: dict[str, Any]) -> str | None:
    text = outcome["text"]
    if not outcome["meant"]:
        return "a raw error"
    if not any(name in text for name in case.names):
        return f"an error that names none of {', '.join(case.names)}"
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in text):
        return "an error that a terminal obeys"
    return "an error without an end" if len(text) > LONGEST else None


def _lost(directory: Path) -> str | None:
    """What there should be of the steps that were taken."""
    steps = directory / "steps"
    taken = [int(line) for line in steps.read_text().split()] if steps.exists() else []
    run = directory / "run"
    lines = [line["step"] for line in read(run / "metrics.jsonl")] if taken else []
    if lines != taken:
        return f"metrics.jsonl has steps {lines}, and taken were {taken}"
    if taken and (fault := atomic.verified(run / "checkpoints" / f"step-{taken[-1]:08d}")):
        return f"the checkpoint of step {taken[-1]}: {fault}"
    return None
