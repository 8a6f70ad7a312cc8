"""A file imports only from its own floor or below; only runtime/ knows about distribution."""

import ast
import tomllib
from pathlib import Path

import pytest

import rlhf_pg

ROOT = Path(rlhf_pg.__file__).parent
FLOORS = [
    {
        "masking",
        "kl",
        "control",
        "advantages",
        "losses",
        "experience",
        "micro_batches",
        "running",
        "attempts",
        "noise",
    },
    {"fields", "config", "recipe", "foreign_keys", "quoted"},
    {
        "models",
        "data",
        "rewards",
        "tasks",
        "faults",
        "launcher",
        "streams",
        "sealed",
        "random_states",
        "same_run",
        "user_code",
        "run_files",
    },
    {"rollout", "runtime", "checkpoint", "output", "metrics", "progress"},
    {"trainers", "report", "plan"},
    {"cli"},
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor_of(part: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if part in floor)


GROUND_FLOOR = [path for path in FILES if floor_of(part_of(path)) == 0]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def parts(names: set[str]) -> set[str]:
    """The parts of the package among imported names: `rlhf_pg.models.policy.Policy` -> models."""
    known = set().union(*FLOORS)
    return {name.split(".")[1] for name in names if name.startswith("rlhf_pg.")} & known


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    own = floor_of(part_of(path))
    upward = {part for part in parts(imported(path)) if floor_of(part) > own}
    assert not upward


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_runtime_knows_the_distribution_libraries(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert path.parent == ROOT / "runtime" or not roots & {"accelerate", "deepspeed"}


@pytest.mark.parametrize("path", GROUND_FLOOR, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_ground_floor_imports_torch_alone(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported(path)}
    assert roots <= {
        "torch",
        "rlhf_pg",
        "collections",
        "dataclasses",
        "itertools",
        "math",
        "typing",
    }


def test_the_whole_of_grpo_is_one_short_file() -> None:
    assert len((ROOT / "trainers" / "grpo.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_fit_on_a_screen(path: Path) -> None:
    """At most 60 lines, docstring included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 60, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_the_whole_ground_floor_has_to_be_covered() -> None:
    """`make coverage` asks for every line of what pyproject.toml lists."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    asked = project["tool"]["coverage"]["report"]["include"]
    files = {path for pattern in asked for path in ROOT.parent.glob(pattern)}
    floor = {
        path for path in FILES if path.relative_to(ROOT).parts[0].removesuffix(".py") in FLOORS[0]
    }
    assert floor <= files
