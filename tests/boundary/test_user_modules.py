"""Python files and modules of users: found, imported once, and sound in their errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.user_modules import loaded_files
from rlhf_pg.config.files import locate_reward

REWARD = "def accuracy(prompts, completions, **_):\n    return [1.0 for _ in completions]\n"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Leave the interpreter as it was: no module of a test stays known."""
    for name in ("mine", "helpers"):  # another file's tests may have left them
        sys.modules.pop(name, None)
    modules = dict(sys.modules)
    own = [path for path in sys.path if "pytest-of" not in path]  # nor the directories of others
    monkeypatch.setattr(sys, "path", own)
    yield
    user_modules.forget()
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def load(name: str, beside: Path | None) -> Any:
    """What a name in a recipe means."""
    return user_modules.load(locate_reward(name, beside))


def failure(name: str, beside: Path | None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load(name, beside)
    return str(caught.value)


def test_file_beside_recipe_comes_before_working_directory(tmp_path, monkeypatch):
    recipe = write(tmp_path / "recipe", mine="def here():\n    return 'recipe'\n")
    monkeypatch.chdir(write(tmp_path / "cwd", mine="def here():\n    return 'cwd'\n"))
    assert load("mine.py:here", recipe)() == "recipe"
    assert load("mine.py:here", None)() == "cwd"
    assert load("mine.py:here", tmp_path)() == "cwd"
    assert load(f"{recipe}/mine.py:here", None)() == "recipe"
    assert load("../recipe/mine.py:here", None) is load("mine.py:here", recipe)


def test_file_is_imported_once_and_known_to_workers(tmp_path):
    write(tmp_path, mine=REWARD + "def other(): ...\n")
    first = load("mine.py:accuracy", tmp_path)
    assert load("mine.py:accuracy", tmp_path) is first
    mine = [name for name, file in loaded_files().items() if file == str(tmp_path / "mine.py")]
    assert mine == [first.__module__]


@pytest.mark.parametrize("name", ["team.scores:accuracy", "team.scores.accuracy"])
@pytest.mark.parametrize("is_here", [True, False])
def test_dotted_name_is_found_beside_recipe_or_in_working_directory(
    tmp_path, monkeypatch, name, is_here
):
    write(tmp_path / "team", scores="from team.other import accuracy\n", other=REWARD)
    if is_here:
        monkeypatch.chdir(tmp_path)
    assert load(name, None if is_here else tmp_path)([], ["a"]) == [1.0]
    assert load("json.dumps", None) is json.dumps


def test_siblings_are_importable_at_the_top_and_within_functions(tmp_path):
    text = "import helpers\ndef value():\n    import late\n    return helpers.VALUE + late.VALUE\n"
    write(tmp_path, mine=text, helpers="VALUE = 1\n", late="VALUE = 2\n")
    assert load("mine.py:value", tmp_path)() == 3


@pytest.mark.fault(61, "one error says where it was looked for")
def test_missing_file_error_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path / "cwd"))
    said = failure("mine.py:accuracy", tmp_path)
    assert f"there is no file {tmp_path}/cwd/mine.py, nor one beside the recipe" in said


@pytest.mark.fault(61, "one error has its own traceback, before anything is trained")
@pytest.mark.parametrize("name", ["mine.py:accuracy", "mine:accuracy"])
def test_failing_import_shows_own_traceback_and_can_be_mended(tmp_path, name):
    write(tmp_path, mine="import helpers\n" + REWARD, helpers="def f():\n    1 / 0\nf()\n")
    said = failure(name, tmp_path).split("\n")
    files = [line.split('"')[1] for line in said if line.startswith("  File")]
    assert files == [f"{tmp_path}/{file}.py" for file in ("mine", "helpers", "helpers")]
    assert said[-1] == "ZeroDivisionError: division by zero"
    write(tmp_path, helpers="f = 'longer, so that the compiled file is stale'\n")
    assert load(name, tmp_path)([], []) == []


@pytest.mark.parametrize(
    ("text", "last"), [("def f(:\n", "SyntaxError"), ("import sys\nsys.exit(0)\n", "SystemExit: 0")]
)
def test_any_failure_of_a_file_is_one_error(tmp_path, text, last):
    write(tmp_path, mine=text)
    assert failure("mine.py:f", tmp_path).split("\n")[-1].startswith(last)


@pytest.mark.parametrize("name", ["absent_package.scores:f", "json.absent:f"])
def test_missing_module_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert f"No module named '{name.split(':')[0].removesuffix('.scores')}'" in failure(
        name, tmp_path
    )


def test_missing_function_error_names_nearest_and_all(tmp_path):
    text = REWARD + "def brevity(**_): ...\ndef _inner(): ...\nclass Made: ...\nLIMIT = 3\n"
    write(tmp_path, mine=text)
    said = failure("mine.py:acuracy", tmp_path)
    assert "did you mean 'accuracy'" in said
    assert said.endswith(": accuracy, brevity")
    for name in ("LIMIT", "Made"):
        assert f"it has no function {name}" in failure(f"mine.py:{name}", tmp_path)


@pytest.mark.parametrize("name", ["https://evil.example/rewards.py:f", "mine.py", "mine.py:f()"])
def test_malformed_name_is_refused(tmp_path, name):
    assert name in failure(name, tmp_path)


def test_code_is_named_before_it_is_imported(tmp_path, capsys):
    write(tmp_path, mine="print('imported')\n" + REWARD)
    load("mine.py:accuracy", tmp_path)
    load("mine.py:accuracy", tmp_path)
    assert capsys.readouterr().out == f"runs {tmp_path}/mine.py:accuracy\nimported\n"


@pytest.mark.parametrize(
    "name", ["mine.py:accuracy", "mine:accuracy", "{out}/link.py:accuracy", "os:system"]
)
def test_config_that_was_found_brings_no_code(tmp_path, monkeypatch, name):
    """Its directory may be the working directory, and its files reached by a link."""
    run = write(tmp_path / "run", mine=f"open({str(tmp_path / 'ran')!r}, 'w')\n" + REWARD)
    own = write(tmp_path / "own", mine=REWARD)
    (own / "link.py").symlink_to(run / "mine.py")
    monkeypatch.chdir(run)
    user_modules.distrust(run / "config.yaml", ["mine.py:accuracy"])
    assert "add --trust_run" in failure(name.format(out=own), run)
    assert not (tmp_path / "ran").exists()
    assert load("mine.py:accuracy", own)([], []) == []
    user_modules.forget()
    assert callable(load(name.format(out=own), run))
