"""Known mistakes, each as a small patch that a test has to notice; `make mutants` tries all.

The files *.txt beside this one hold them, each as

    name: function, by its dotted name
    - what stands exactly once in it
    + the mistake in its place
    ! a test that fails by a number then
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Place(NamedTuple):
    """Where a dotted name is defined: a file, and the characters from `start` to `end` of it."""

    file: str
    names: tuple[str, ...]  # of the class and the function in it
    start: int
    end: int


@dataclass(frozen=True)
class Mutant:
    """One mistake, put into a copy of a function."""

    name: str
    target: str
    old: str
    new: str
    killer: str  # a pytest node id

    def text(self) -> str:
        """The text of the target's file with the mistake in it."""
        file, _, start, end = find(self.target)
        text = (ROOT / file).read_text()
        return text[:start] + self.part() + text[end:]

    def part(self) -> str:
        """The target alone, with the mistake in it."""
        file, _, start, end = find(self.target)
        own = (ROOT / file).read_text()[start:end]
        count = own.count(self.old)
        assert count == 1, f"{self.name}: `old` stands {count} times in {self.target}, not once"
        return own.replace(self.old, self.new)


def read(path: Path) -> list[Mutant]:
    """The mutants of a file."""
    mutants = []
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.strip("\n").split("\n") if not line.startswith("#")]
        if any(lines):
            name, target = lines[0].split(": ")
            old, new, (killer,) = (
                [line[2:] for line in lines[1:] if line[0] == mark] for mark in "-+!"
            )
            mutants.append(Mutant(name, target, "\n".join(old), "\n".join(new), killer))
    return mutants


def all_mutants() -> list[Mutant]:
    """The mutants of all files beside this one."""
    return [mutant for path in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read(path)]


@cache
def find(target: str) -> Place:
    """Where a dotted name is defined; what a package hands on is followed to its own file."""
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        stem = "/".join(parts[:count])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (ROOT / file).exists():
                return _inside(file, parts[count:])
    raise ValueError(f"there is no module for {target}")


@cache
def parsed(file: str) -> tuple[str, list[ast.stmt]]:
    text = (ROOT / file).read_text()
    return text, ast.parse(text).body


def _inside(file: str, names: list[str]) -> Place:
    text, body = parsed(file)
    for depth, name in enumerate(names):
        for node in body:
            if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
                return find(".".join([str(node.module), *names[depth:]]))
        found = next((n for n in body if isinstance(n, DEFINITIONS) and n.name == name), None)
        assert found is not None, f"{file} does not define {name}"
        body = found.body
    lines = text.splitlines(keepends=True)
    first = min(node.lineno for node in (found, *found.decorator_list)) - 1
    start = sum(map(len, lines[:first]))
    return Place(file, tuple(names), start, start + sum(map(len, lines[first : found.end_lineno])))
