"""Names of files in a config: made absolute beside the recipe, or else in the working directory."""

from pathlib import Path

import pytest

from rlhf_pg import PPOConfig
from rlhf_pg.config.files import absolute


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A directory with files of every kind; the working directory is another."""
    for name in ("data.jsonl", "mine.py", "team/scores.py", "kind.md", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "cwd/Kind").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def config() -> PPOConfig:
    return PPOConfig(
        model_name_or_path="model",
        value_model_name_or_path="org/model",
        reward_model_name_or_path="model",
        dataset_name="data.jsonl",
        eval_dataset_name=["absent.jsonl"],
        reward_funcs=(
            *("mine.py:f", "team.scores:f", "team.scores.g", "json.dumps", "absent.py:f"),
            *("model:model", "judge:kind", "judge:text", "http://h/s", "exact"),
        ),
        reward_options={
            "judge:kind": {"rubric": "kind.md", "cache": "verdicts"},
            "text": {"rubric": "Kind"},  # the name of a folder
            "mine.py:f": {"limit": 1, "cache": "lru"},
        },
    )


def test_names_of_files_become_absolute(recipe):
    args = config().locate(recipe)
    assert args.model_name_or_path == args.reward_model_name_or_path == f"{recipe}/model"
    assert args.value_model_name_or_path == "org/model"
    assert args.dataset_name == (f"{recipe}/data.jsonl",)
    assert args.eval_dataset_name == ("absent.jsonl",)
    assert args.reward_funcs == (
        *(f"{recipe}/mine.py:f", f"{recipe}/team.scores:f", f"{recipe}/team.scores.g"),
        *("json.dumps", "absent.py:f", f"model:{recipe}/model", "judge:kind", "judge:text"),
        *("http://h/s", "exact"),
    )
    assert args.reward_options == {
        "judge:kind": {"rubric": f"{recipe}/kind.md", "cache": f"{recipe}/cwd/verdicts"},
        "text": {"rubric": "Kind"},
        f"{recipe}/mine.py:f": {"limit": 1, "cache": "lru"},
    }
    assert args.locate() == args


def test_config_of_python_is_located_in_the_working_directory(recipe, monkeypatch):
    args, other = config(), config()
    monkeypatch.chdir(recipe)
    assert args.locate().dataset_name == (f"{recipe}/data.jsonl",)
    assert args == other


def test_directories_of_a_run_may_name_the_users(recipe, monkeypatch):
    monkeypatch.setenv("HOME", str(recipe))
    for name in ("~/runs", "$HOME/runs", "${HOME}/runs"):
        assert PPOConfig(output_dir=name).locate().output_dir == f"{recipe}/runs"


def test_no_name_is_no_folder(recipe):
    assert absolute("", recipe) == ""
