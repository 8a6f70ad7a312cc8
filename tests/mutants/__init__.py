"""Known mistakes, each as a small patch that the tests have to notice; `make mutants` tries all."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake, put into a copy of the package.

    `old` stands exactly once in `file`; with `new` in its place at least one of `killers` fails.
    """

    name: str  # in-kebab-case
    mistake: str  # what is wrong, and where it is found: one line for docs/correctness.md
    file: str  # for example "rlhf_pg/losses.py"
    old: str
    new: str
    killers: tuple[str, ...]  # pytest node ids, without parameters
