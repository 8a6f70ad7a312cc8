"""Reward functions for workers: each does to the completion "bad" what its name says.

The file imports nothing heavy, since every worker imports it.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def length(completions):
    """A reward that is right."""
    return [float(len(text)) for text in completions]


def hangs(completions):
    if "bad" in completions:
        time.sleep(1000)
    return length(completions)


def hangs_with_the_lock(completions):
    """A pattern that backtracks for ever never lets another thread run."""
    if "bad" in completions:
        re.match(r"(a|a)*b", "a" * 60)
    return length(completions)


def raises(completions):
    if "bad" in completions:
        raise KeyError("answer")
    return length(completions)


def exits(completions):
    if "bad" in completions:
        os._exit(3)
    return length(completions)


def exits_politely(completions):
    if "bad" in completions:
        sys.exit("enough")
    return length(completions)


def is_killed(completions):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    return length(completions)


def takes_all_memory(completions):
    if "bad" in completions:
        hoard = []
        while True:
            hoard.append(bytearray(2**24))
    return length(completions)


def is_not_a_number(completions):
    return [float("nan") if text == "bad" else 1.0 for text in completions]


def cannot_be_pickled(completions):
    return [(lambda: 1.0) if text == "bad" else 1.0 for text in completions]


def prints(completions):
    print("noise")
    return length(completions)


def process(completions):
    """The number of the process."""
    return [float(os.getpid())] * len(completions)


def calls(completions):
    """How many completions a call is about."""
    return [float(len(completions))] * len(completions)


def steps(completion_ids):
    return [[None] * (len(ids) - 1) + [0.1] for ids in completion_ids]


async def awaits(completions):
    return length(completions)


def returns_awaitable(completions):
    return awaits(completions)


def sees(completions, trainer_state, step, ended, log_extra, log_metric, answer):
    """What it is told, logged."""
    log_extra(
        "seen",
        [f"{step} {trainer_state.max_steps} {e} {a}" for e, a in zip(ended, answer, strict=True)],
    )
    log_metric("answers", len(answer))
    return length(completions)


def sees_no_environments(completions, **given):
    assert "environments" not in given
    return length(completions)


def environment(completions):
    """Whether the process is kept off GPUs, other cores and the trainer's group."""
    there = os.environ
    alone = there["CUDA_VISIBLE_DEVICES"] == "" and there["OMP_NUM_THREADS"] == "1"
    return [float(alone and "RANK" not in there and "torch" not in sys.modules)] * len(completions)


def meets(prompts, completions):
    """Wait in the directory that the completions name for the call about another prompt."""
    place = Path(completions[0])
    (place / prompts[0]).touch()
    while len(list(place.iterdir())) < 2:
        time.sleep(0.01)
    return [1.0] * len(completions)


def breaks():
    """What a process cannot get ready by."""
    raise ZeroDivisionError


def hangs_with_a_child(completions):
    """Write the number of a child into the file that the first completion names, then hang."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(completions[0]).write_text(str(child.pid))
    child.wait()


class Judge:
    """A callable that is pickled with what it holds."""

    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, completions):
        return [score + self.bonus for score in length(completions)]
