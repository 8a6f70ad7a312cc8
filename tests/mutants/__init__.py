"""Known mistakes, each as a small patch that the tests have to notice; `make mutants` tries all."""

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Place(NamedTuple):
    """Where a dotted name is defined: a file, and the characters from `start` to `end` of it."""

    file: str
    names: tuple[str, ...]  # of the class and the function in it; none of them: the whole file
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake, put into a copy of the package.

    `old` stands exactly once in `target`; with `new` in its place at least one of `killers` fails.
    """

    name: str  # in-kebab-case
    mistake: str  # what is wrong, and where it is found: one line for docs/correctness.md
    target: str  # a function, method, class or module by dotted name: "rlhf_pg.advantages.gae"
    old: str
    new: str
    killers: tuple[str, ...]  # pytest node ids; with parameters only where all of them are slow

    @property
    def file(self) -> str:
        """The path of the file that defines the target, from the root of the repository."""
        return find(self.target).file

    def text(self) -> str:
        """The text of that file with the mistake in it.

        Raises:
            ValueError: `old` does not stand exactly once in the target.
        """
        file, _, start, end = find(self.target)
        text = (ROOT / file).read_text()
        own = text[start:end]
        if own.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: `old` stands {own.count(self.old)} times in {self.target}, not once"
            )
        return text[:start] + own.replace(self.old, self.new) + text[end:]


@cache
def find(target: str) -> Place:
    """Where a dotted name is defined; what a package hands on is followed to its own file.

    The source is read, and nothing is imported: mutants run in a copy of the package.

    Raises:
        ValueError: there is no such name.
    """
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        stem = "/".join(parts[:count])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (ROOT / file).exists():
                return _inside(file, parts[count:], target)
    raise ValueError(f"there is no module for {target}")


def _inside(file: str, names: list[str], target: str) -> Place:
    text = (ROOT / file).read_text()
    if not names:
        return Place(file, (), 0, len(text))
    body: list[ast.stmt] = ast.parse(text).body
    for depth, name in enumerate(names):
        for node in body:
            if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
                return find(".".join([str(node.module), *names[depth:]]))
        found = next((n for n in body if isinstance(n, DEFINITIONS) and n.name == name), None)
        if found is None:
            raise ValueError(f"{file} does not define {name}, of the target {target}")
        body = found.body
    lines = text.splitlines(keepends=True)
    first = min(node.lineno for node in (found, *found.decorator_list)) - 1
    start = sum(map(len, lines[:first]))
    return Place(file, tuple(names), start, start + sum(map(len, lines[first : found.end_lineno])))


def all_mutants() -> list[Mutant]:
    """`MUTANTS` of every module beside this file, in order of the modules' names."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "run"
    ]
    return [mutant for module in modules for mutant in module.MUTANTS]
