"""The lists of mutants keep step with the code; `make mutants` is what tries them."""

import ast
import re
import textwrap
from functools import cache

from tests.mutants import ROOT, all_mutants, read

MUTANTS = [*all_mutants(), *read(ROOT / "tests" / "device" / "mutants.txt")]


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_mutant_names_are_unique_and_kebab_case() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


def test_mutants_apply_and_their_killers_exist() -> None:
    for mutant in MUTANTS:
        ast.parse(textwrap.dedent(mutant.part()))
        path, *names = mutant.killer.split("::")
        assert names[-1].split("[")[0] in functions_in(path), f"there is no {mutant.killer}"
