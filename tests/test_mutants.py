"""The list of mutants keeps step with the code; `make mutants` is what tries them."""

import ast
import re
from functools import cache

import pytest

from tests.device import mutants as device
from tests.mutants import ROOT, Mutant, all_mutants

MUTANTS = [*all_mutants(), *device.MUTANTS]


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_mutant_names_are_unique_and_kebab_case() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_and_its_killers_exist(mutant: Mutant) -> None:
    text = mutant.text()  # refuses one whose `old` does not stand exactly once
    assert text != (ROOT / mutant.file).read_text()
    ast.parse(text)
    assert mutant.killers
    for killer in mutant.killers:
        path, *names = killer.split("::")
        assert names[-1].split("[")[0] in functions_in(path), f"there is no {killer}"
        assert "\n" not in mutant.mistake
