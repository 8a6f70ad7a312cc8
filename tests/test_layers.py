"""A file imports only from its own floor or below; only runtime/ knows about distribution."""

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rlhf_pg

ROOT = Path(rlhf_pg.__file__).parent
# From the ground up: what a floor is about, and its files and wings. A file that stands on another
# floor than the rest of its wing is named itself.
FLOORS = {
    "pure functions on tensors": (
        *("masking", "kl", "rng", "running_stats", "advantages", "losses"),
        *("data.batch", "data.micro_batches", "data.rows", "rewards.scores", "report.pass_at_k"),
    ),
    "settings, and what comes from outside": ("config", "boundary", "failpoints"),
    "text and models": ("data", "models"),
    "processes and files": ("runtime", "checkpoint", "report"),
    "samples and scores": ("rollout", "episodes", "agents", "rewards"),
    "the loop and the algorithms": ("run", "trainers", "supervised", "tasks"),
    "runs, before and after": ("plan", "replay", "audit"),
    "the command": ("cli",),
}
# What the ground floor may import beside torch.
PLAIN = {"collections", "dataclasses", "itertools", "math", "numpy", "random", "torch", "typing"}
AT_THE_ROOT = {"__init__", "failpoints", "kl", "losses", "masking", "rng", "running_stats"}


def name_of(path: Path) -> str:
    """The dotted name below the package, for example "models.policy"; of a wing its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT}
FILES |= {name_of(path): path for path in sorted(ROOT.glob("*.py")) if path.stem != "__init__"}


def floor_of(name: str) -> int:
    """The number of the floor on which a file stands: the longest name that it begins with."""
    floors = {part: number for number, parts in enumerate(FLOORS.values()) for part in parts}
    words = name.split(".")
    beginnings = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(floors[beginning] for beginning in beginnings if beginning in floors)


GROUND_FLOOR = [name for name in FILES if floor_of(name) == 0]


def imported(name: str) -> Iterator[str]:
    """Everything that a file imports, by dotted name, wherever in it: for type checkers too."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """The files of the package that a file imports from."""
    inner = [
        full.removeprefix("rlhf_pg.") for full in imported(name) if full.startswith("rlhf_pg.")
    ]
    return {full if full in FILES else full.rpartition(".")[0] for full in inner} & FILES.keys()


def test_imports_point_downward() -> None:
    upward = [
        f"{name} imports {other}"
        for name in FILES
        for other in own_imports(name)
        if floor_of(other) > floor_of(name)
    ]
    assert not upward


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter({name: own_imports(name) for name in FILES}).prepare()
    except CycleError as error:
        pytest.fail(f"these import one another: {' -> '.join(error.args[1])}")


def test_root_has_only_allowed_files() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} <= AT_THE_ROOT


def test_only_runtime_imports_distribution_libraries() -> None:
    wrong = [
        f"{name} imports {full}"
        for name in FILES
        for full in imported(name)
        if full.split(".")[0] in ("accelerate", "deepspeed") and not name.startswith("runtime.")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("wing", "refused"),
    [
        ("trainers", ("plan", "replay", "audit", "supervised", "tasks", "cli")),
        ("rewards", ("rollout", "episodes")),
        ("rollout", ("episodes", "agents", "trainers")),
        ("episodes", ("agents", "trainers")),  # a run that has an agent asks for it by name
        ("trainers", ("agents",)),
        ("run", ("trainers", "supervised", "rollout", "rewards", "episodes")),
    ],
)
def test_wing_does_not_know_others(wing: str, refused: tuple[str, ...]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if name.split(".")[0] == wing
        for other in own_imports(name)
        if other.split(".")[0] in refused
    ]
    assert not wrong


def loaded_with(name: str) -> set[str]:
    """The files that importing one loads, packages included."""
    loaded: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in FILES:
            continue
        loaded.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        for node in ast.parse(FILES[name].read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlhf_pg."):
                module = str(node.module).removeprefix("rlhf_pg.")
                waiting += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.ImportFrom) and node.module == "rlhf_pg":
                waiting += [alias.name for alias in node.names]
    return loaded


def test_parts_are_imported_without_the_rest() -> None:
    """The losses need `masking` alone, and an engine no episodes."""
    assert loaded_with("losses") == {"losses", "masking"}
    wings = {name.split(".")[0] for name in loaded_with("rollout.native.engine")}
    assert not wings & {"agents", "episodes", "rewards", "run", "runtime", "supervised", "trainers"}


def test_config_does_not_import_torch() -> None:
    """`--help` takes no time; the functions of users' own estimators are looked up later."""
    config = [name for name in FILES if name.split(".")[0] == "config"]
    for name in config:
        assert not {full.split(".")[0] for full in imported(name)} & {"torch", "transformers"}, name


def test_ground_floor_imports_only_torch() -> None:
    for name in GROUND_FLOOR:
        assert {full.split(".")[0] for full in imported(name)} <= PLAIN | {"rlhf_pg"}, name


def test_coverage_includes_whole_ground_floor() -> None:
    """`make coverage` asks for every line of what pyproject.toml lists."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    asked = project["tool"]["coverage"]["report"]["include"]
    files = {path for pattern in asked for path in ROOT.parent.glob(pattern)}
    assert {FILES[name] for name in GROUND_FLOOR} <= files


def test_classes_have_names_of_their_own() -> None:
    """A reader who meets a name knows which it is."""
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def names_in(path: Path) -> set[str]:
    """What a file defines or imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_names_that_examples_tests_and_benchmarks_import_exist() -> None:
    """Many of these files are not run by most commands."""
    root = ROOT.parent
    known = {name: names_in(path) for name, path in FILES.items()}
    wrong = []
    for folder in ("benchmarks", "docs", "examples", "recipes", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or node.module is None:
                    continue
                if not node.module.startswith("rlhf_pg."):
                    continue
                home = node.module.removeprefix("rlhf_pg.")
                for alias in node.names:
                    if (
                        alias.name not in known.get(home, ())
                        and f"{home}.{alias.name}" not in FILES
                    ):
                        wrong.append(f"{path.relative_to(root)}: {node.module}.{alias.name}")
    assert not wrong
