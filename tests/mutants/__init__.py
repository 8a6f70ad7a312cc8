"""Known mistakes, each as a small patch that the tests have to notice; `make mutants` tries all."""

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake, put into a copy of the package.

    `old` stands exactly once in `file`; with `new` in its place at least one of `killers` fails.
    """

    name: str  # in-kebab-case
    mistake: str  # what is wrong, and where it is found: one line for docs/correctness.md
    file: str  # for example "rlhf_pg/losses/policy.py"
    old: str
    new: str
    killers: tuple[str, ...]  # pytest node ids; with parameters only where all of them are slow


def all_mutants() -> list[Mutant]:
    """`MUTANTS` of every module beside this file, in order of the modules' names."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "run"
    ]
    return [mutant for module in modules for mutant in module.MUTANTS]
