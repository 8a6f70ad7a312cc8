"""Python files and modules of users: found, imported once, and known in another process."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_pg.boundary import user_files, user_modules
from rlhf_pg.boundary.user_modules import PREFIX, install, loaded
from rlhf_pg.config.rewards import located

REWARD = "def accuracy(prompts, completions, **_):\n    return [1.0 for _ in completions]\n"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Leave the interpreter as it was: no module of a test stays known."""
    modules, finders = dict(sys.modules), list(sys.meta_path)
    monkeypatch.setattr(user_files.finder, "files", {})
    yield
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.meta_path[:] = finders


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def load(name: str, beside: Path | None) -> Any:
    """What a name in a recipe means."""
    return user_modules.load(located(name, beside))


def failure(name: str, beside: Path | None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load(name, beside)
    return str(caught.value)


# ------------------------------------------------------------------------------ what is found


def test_file_beside_recipe_comes_before_working_directory(tmp_path, monkeypatch):
    recipe = write(tmp_path / "recipe", mine="def here():\n    return 'recipe'\n")
    monkeypatch.chdir(write(tmp_path / "cwd", mine="def here():\n    return 'cwd'\n"))
    assert load("mine.py:here", recipe)() == "recipe"
    assert load("mine.py:here", None)() == "cwd"
    assert load("mine.py:here", tmp_path)() == "cwd"
    assert load(f"{recipe}/mine.py:here", None)() == "recipe"
    assert load("../recipe/mine.py:here", None) is load("mine.py:here", recipe)


def test_file_is_imported_once_under_stable_name(tmp_path):
    write(tmp_path, mine=REWARD + "made = []\ndef other(): ...\n")
    first = load("mine.py:accuracy", tmp_path)
    assert load("mine.py:accuracy", tmp_path) is first
    assert first.__module__.startswith(PREFIX + "mine_")
    assert first.__module__ == load("mine.py:other", tmp_path).__module__
    assert loaded() == {first.__module__: str(tmp_path / "mine.py")}


@pytest.mark.parametrize("name", ["json:dumps", "json.dumps"])
def test_dotted_name_means_installed_module(name):
    assert load(name, None) is json.dumps
    assert loaded() == {}


@pytest.mark.parametrize("name", ["team.scores:accuracy", "team.scores.accuracy"])
@pytest.mark.parametrize("is_package", [True, False])
@pytest.mark.parametrize("is_here", [True, False])
def test_dotted_name_means_package_beside_recipe_or_in_working_directory(
    tmp_path, monkeypatch, name, is_package, is_here
):
    other = "from team.other import accuracy\n"
    write(tmp_path / "team", scores=other, other=REWARD)
    write(tmp_path / "team", **({"__init__": ""} if is_package else {}))
    if is_here:
        monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load(name, None if is_here else tmp_path)([], ["a"]) == [1.0]
    assert sys.path == before
    assert Path(loaded()["team"]).parent == (tmp_path / "team" if is_package else tmp_path)


def test_siblings_are_importable_at_the_top_and_within_functions(tmp_path):
    text = "import helpers\ndef value():\n    import late\n    return helpers.VALUE + late.VALUE\n"
    write(tmp_path, mine=text, helpers="VALUE = 1\n", late="VALUE = 2\n")
    before = list(sys.path)
    assert load("mine.py:value", tmp_path)() == 3
    assert sys.path == before


def test_sibling_does_not_shadow_standard_library(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    write(tmp_path, mine="import wave\ndef own():\n    return wave.__file__\n", wave="")
    assert not load("mine.py:own", tmp_path)().startswith(str(tmp_path))


def test_sibling_shadows_what_is_installed_only_for_its_file(tmp_path):
    write(tmp_path, mine="import pluggy\ndef own():\n    return pluggy.__file__\n", pluggy="")
    installed = sys.modules.pop("pluggy")
    try:
        assert load("mine.py:own", tmp_path)() == str(tmp_path / "pluggy.py")
    finally:
        sys.modules["pluggy"] = installed


def test_namesakes_in_two_directories_do_not_meet(tmp_path):
    text = "import helpers\ndef value():\n    return helpers.VALUE\n"
    for name in "ab":
        write(tmp_path / name, mine=text, helpers=f"VALUE = {name!r}\n")
    first, second = (load("mine.py:value", tmp_path / name) for name in "ab")
    assert (first(), second()) == ("a", "b")


# ---------------------------------------------------------------------------- another process


IN_WORKER = """
import json, pickle, sys
from rlhf_pg.boundary.user_modules import install
files, functions = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
install(files)
print([function() for function in pickle.loads(functions)])
"""


def test_functions_unpickle_by_reference_in_another_process(tmp_path, monkeypatch):
    """A file with its sibling, what a file hands on from its sibling, and two namesakes."""
    text = "import helpers\nfrom shared import given\ndef value():\n    return helpers.VALUE\n"
    shared = "def given():\n    return 'given'\n"
    write(tmp_path / "a", mine=text, helpers="VALUE = 'a'\n", shared=shared)
    write(tmp_path / "b", mine=text.replace("from shared import given\n", ""))
    write(tmp_path / "b", helpers="VALUE = 'b'\n")
    write(tmp_path / "c/team", scores="def value():\n    return 'c'\n")
    monkeypatch.chdir(tmp_path / "c")
    functions = [load("mine.py:value", tmp_path / name) for name in "ab"]
    functions += [load("mine.py:given", tmp_path / "a"), load("team.scores:value", None)]
    sent = [json.dumps(loaded()), pickle.dumps(functions).hex()]
    root = Path(user_modules.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IN_WORKER, *sent],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['a', 'b', 'given', 'c']\n", done.stderr


def test_install_is_idempotent():
    for _ in range(2):
        install({})
    assert sys.meta_path.count(user_files.finder) == 1


# ------------------------------------------------------------------------------------- refused


@pytest.mark.fault(61, "one error says where it was looked for")
def test_missing_file_error_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path / "cwd"))
    said = failure("mine.py:accuracy", tmp_path)
    assert f"there is no file {tmp_path}/cwd/mine.py, nor one beside the recipe" in said
    assert failure("/nowhere/mine.py:f", None).endswith("there is no file /nowhere/mine.py")


@pytest.mark.fault(61, "one error has its own traceback, before anything is trained")
def test_failing_import_shows_own_traceback_and_no_more(tmp_path):
    write(tmp_path, mine="import helpers\n", helpers="def f():\n    1 / 0\nf()\n")
    said = failure("mine.py:accuracy", tmp_path).split("\n")
    assert said[0] == f"{tmp_path}/mine.py:accuracy cannot be imported:"
    assert said[1] == "Traceback (most recent call last):"
    files = [line for line in said if line.startswith("  File")]
    assert files == [
        f'  File "{tmp_path}/mine.py", line 1, in <module>',
        f'  File "{tmp_path}/helpers.py", line 3, in <module>',
        f'  File "{tmp_path}/helpers.py", line 2, in f',
    ]
    assert said[-1] == "ZeroDivisionError: division by zero"
    assert loaded() == {}


def test_file_mended_after_failure_is_imported(tmp_path):
    write(tmp_path, mine="import absent_module\n")
    assert failure("mine.py:accuracy", tmp_path).endswith("No module named 'absent_module'")
    write(tmp_path, mine=REWARD + "# and now it is longer\n")
    assert load("mine.py:accuracy", tmp_path)([], []) == []


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("def f():\n    f()\nf()\n", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_any_failure_of_a_file_is_one_error(tmp_path, text, last):
    write(tmp_path, mine=text)
    said = failure("mine.py:accuracy", tmp_path).split("\n")
    assert said[-1].startswith(last)
    assert len(said) < 50
    assert not [line for line in said if "user_modules" in line or "importlib" in line]


def test_failing_dotted_module_shows_own_traceback(tmp_path, monkeypatch):
    write(tmp_path / "team", scores="import absent_module\n")
    monkeypatch.chdir(tmp_path)
    said = failure("team.scores:accuracy", None)
    assert f'File "{tmp_path}/team/scores.py", line 1' in said
    assert "frozen" not in said


@pytest.mark.parametrize("name", ["absent_package.scores:f", "json.absent:f"])
def test_missing_module_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    said = failure(name, tmp_path)
    assert f"there is no module {name.split(':')[0].removesuffix('.scores')}, neither" in said
    assert f"nor in {tmp_path} or beside the recipe" in said


def test_missing_function_error_names_nearest_and_all(tmp_path):
    text = REWARD + "def brevity(**_): ...\ndef _inner(): ...\nclass Made: ...\nLIMIT = 3\n"
    write(tmp_path, mine=text)
    assert failure("mine.py:acuracy", tmp_path) == (
        f"{tmp_path}/mine.py:acuracy: it has no function acuracy; did you mean 'accuracy'?; "
        "functions in it: accuracy, brevity"
    )
    assert failure("mine.py:LIMIT", tmp_path).endswith("mine.py:LIMIT is 3, which cannot be called")
    assert "is a class" in failure("mine.py:Made", tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("https://evil.example/rewards.py:f", "is a URL"),
        ("file:///tmp/rewards.py:f", "is a URL"),
        ("mine.py", "write mine.py:NAME"),
        ("accuracy", "names no function"),
        (".mine:f", "names no function"),
        ("mine.py:f()", "names no function"),
        ("os:system('true')", "names no function"),
    ],
)
def test_malformed_name_is_refused_without_import(tmp_path, name, reason):
    assert reason in failure(name, tmp_path)
