"""A handful of what `make fuzz` draws, and the fuzzer itself."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.case import Case, small
from tests.fuzz.run import KINDS, case
from tests.fuzz.verdict import judged


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_fault_costs_no_more_than_necessary(number, tmp_path):
    [verdict] = judged([(number, case(0, number))], tmp_path, workers=1)
    assert verdict.fault is None, verdict


def test_same_seed_gives_same_cases():
    first, again, other = ([case(seed, n).what for n in range(200)] for seed in (0, 0, 1))
    assert first == again
    assert len(set(first)) == 200
    assert sum(a != b for a, b in zip(first, other, strict=True)) > 190


@pytest.mark.slow
def test_cases_do_not_depend_on_hash_order():
    """Sets of strings come in another order in every process."""
    keys = [case(0, n).what for n in range(3, 200, 5)]
    code = "from tests.fuzz.run import case; print([case(0, n).what for n in range(3, 200, 5)])"
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONHASHSEED": "7"}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == str(keys)


def failing(error: Any) -> Any:
    def judge(**_: Any) -> Any:
        raise error

    return judge


def gone(output: Path) -> Any:
    os._exit(3)


def raw(output: Path) -> Any:
    raise KeyError("prompt")


def forgetful(output: Path) -> Any:
    trainer = small(output)
    trainer.save_checkpoint = lambda: output
    return trainer


@pytest.mark.parametrize(
    ("run", "names", "fault"),
    [
        (small, (), None),
        (raw, ("prompt",), "a raw error"),
        (gone, (), "it ended without a word, with 3"),
        (forgetful, (), "the checkpoint of step 3: it has no manifest.json"),
        (lambda output: small(output, reward_funcs=failing(OSError())), ("judge",), None),
        (
            lambda output: small(output, reward_funcs=failing(OSError())),
            ("environment",),
            "an error that names none of environment",
        ),
    ],
)
def test_misbehaviour_is_reported_as_fault(run, names, fault, tmp_path):
    made = Case(kind="reward", what="", run=run, names=names)
    [verdict] = judged([(0, made)], tmp_path, workers=1)
    assert verdict.fault == fault, verdict
