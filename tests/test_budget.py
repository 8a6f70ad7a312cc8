"""The package keeps within its budget: tokens by wing, and each file written out.

Tokens are names, operators, numbers and strings outside docstrings and comments, a count that no
reformatting changes. A number of TOKENS is raised only in a commit that names the feature.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhf_pg

ROOT = Path(rlhf_pg.__file__).parent
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TOKENS = {
    "__init__.py": 220,
    "advantages": 3379,
    "agents": 8804,
    "audit": 3748,
    "boundary": 4709,
    "checkpoint": 5330,
    "cli": 9721,
    "config": 13069,
    "data": 21171,
    "episodes": 7541,
    "failpoints.py": 132,
    "kl.py": 906,
    "losses.py": 2105,
    "masking.py": 639,
    "models": 24241,
    "plan": 2989,
    "replay": 7394,
    "report": 11410,
    "rewards": 13100,
    "rng.py": 455,
    "rollout": 21428,
    "run": 7876,
    "running_stats.py": 397,
    "runtime": 9688,
    "supervised": 7196,
    "tasks": 5091,
    "trainers": 21535,
}
PER_LINE = 9.0  # of a file above 30 lines of code
# Files that may be denser, and why.
FORMULAS = {
    "advantages/estimators.py": "an estimator is a line or two of tensors",
    "advantages/per_group.py": "the same",
    "advantages/per_token.py": "the same",
    "data/batch.py": "a table of columns, a line each",
    "losses.py": "a loss is a line or two of tensors",
    "masking.py": "statistics, a line each",
    "rng.py": "rounds of a hash",
    "audit/expectation.py": "sums over all that can be sampled",
    "trainers/evaluator.py": "standard errors, pass@k and votes",
    "data/row_files.py": "a table of arrays, a line each",
}
SCRIPTS = ("report/page/*.[jc]s*", 806)  # lines; narrow screens take 6
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
# Names that say nothing, for a variable that is read more than three lines below its binding.
PRONOUNS = {"own", "one", "said", "found", "given", "there", "whole", "rest", "more", "those"}


def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first: Any = node.body[0]
            lines |= set(range(first.lineno, first.end_lineno + 1))
    return lines


def size(source: str) -> tuple[int, int]:
    """Return the tokens of a file and its lines of code."""
    documented = docstring_lines(ast.parse(source))
    tokens = 0
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in COUNTED and token.start[0] not in documented:
            tokens += 1
            code |= set(range(token.start[0], token.end[0] + 1))
    return tokens, len(code)


def wing(file: str) -> str:
    return file.partition("/")[0]


def test_wings_are_within_their_budget() -> None:
    tokens = dict.fromkeys(map(wing, FILES), 0)
    for file, source in FILES.items():
        tokens[wing(file)] += size(source)[0]
    over = {name: count for name, count in tokens.items() if count > TOKENS.get(name, 0)}
    assert not over
    assert TOKENS.keys() == tokens.keys()


def test_files_are_not_dense() -> None:
    dense = dict[str, float]()
    for file, source in FILES.items():
        tokens, code = size(source)
        if code > 30 and tokens > PER_LINE * code:
            dense[file] = tokens / code
    assert dense.keys() == FORMULAS.keys(), dense


def is_swap(node: ast.Assign) -> bool:
    """Return whether an assignment gives the names of one side in another order."""
    targets = ast.unparse(node.targets[0]).strip("()").split(", ")
    values = ast.unparse(node.value).strip("()").split(", ")
    return sorted(targets) == sorted(values)


def puzzles(node: ast.AST) -> Iterator[str]:
    """Yield what reads worse than it would written out."""
    match node:
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()) if not is_swap(node):
            yield "a packed assignment"
        case ast.BinOp(op=ast.Mult()):
            for side in (node.left, node.right):
                is_text = isinstance(side, ast.JoinedStr) or (
                    isinstance(side, ast.Constant) and isinstance(side.value, str)
                )
                other = node.right if side is node.left else node.left
                is_flag = not isinstance(other, ast.Constant)
                if is_text and is_flag:
                    yield "a text times a flag"
                if isinstance(side, ast.List) and isinstance(other, ast.Compare | ast.BoolOp):
                    yield "a list times a flag"
        case ast.Starred(value=ast.Tuple() | ast.List()):
            yield "a spread of literals"
        case ast.IfExp():
            branches = (node.test, node.body, node.orelse)
            if any(isinstance(inner, ast.IfExp) for part in branches for inner in ast.walk(part)):
                yield "nested conditional expressions"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            if len(node.generators) > 1 and any(part.ifs for part in node.generators):
                yield "a comprehension with two for and an if"


def pronouns(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    bound, read = dict[str, int](), dict[str, int]()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in PRONOUNS:
            if isinstance(node.ctx, ast.Store):
                bound[node.id] = min(node.lineno, bound.get(node.id, node.lineno))
            else:
                read[node.id] = max(node.lineno, read.get(node.id, 0))
        elif isinstance(node, ast.arg) and node.arg in PRONOUNS:
            bound[node.arg] = node.lineno
    for name in bound.keys() & read.keys():
        if read[name] - bound[name] > 3:
            yield f"{name}, which is read {read[name] - bound[name]} lines below its binding"


@pytest.mark.parametrize("file", FILES)
def test_statements_are_written_out(file: str) -> None:
    found = []
    for node in ast.walk(ast.parse(FILES[file])):
        found += [f"{node.lineno}: {text}" for text in puzzles(node)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [f"{node.lineno}: {text}" for text in pronouns(node)]
    assert found == []


def test_scripts_of_the_report_are_within_their_budget() -> None:
    pattern, most = SCRIPTS
    scripts = [path for path in ROOT.glob(pattern) if "uPlot" not in path.name]
    assert sum(path.read_text().count("\n") for path in scripts) <= most
