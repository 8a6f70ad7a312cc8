"""`rlhf-pg eval`: the numbers of a trainer, without data to train on."""

import inspect
import json
import logging
import math
import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_pg.boundary.terminal import say
from rlhf_pg.cli import main
from rlhf_pg.cli.main import explaining_errors
from rlhf_pg.cli.recipes import model_of_run
from rlhf_pg.report.evaluation import intervals, tables
from rlhf_pg.tasks import arithmetic
from tests.cli.conftest import refused
from tests.trainers.conftest import digits

HELD_OUT = arithmetic().eval_dataset.select(range(9))


@pytest.fixture
def data(tmp_path) -> str:
    """Nine problems in a file, and a reward in another."""
    source = "from typing import Any\n\n" + inspect.getsource(digits)
    (tmp_path / "my_rewards.py").write_text(source)
    HELD_OUT.to_json(tmp_path / "held_out.jsonl")
    return str(tmp_path / "held_out.jsonl")


def evaluated(tmp_path: Path, *flags: str) -> dict:
    out = tmp_path / "out.json"
    reward = f"{tmp_path / 'my_rewards.py'}:digits"
    main(["eval", *flags, "--reward_funcs", reward, "--json", str(out)])
    return json.loads(out.read_text())


@pytest.mark.parametrize("temperature", [None, 0.7, 0.0])
def test_model_and_file_give_numbers_of_trainer(
    make, model_path, tmp_path, data, capsys, temperature
) -> None:
    options = {"num_generations_eval": 2, "top_p": 0.8}
    trainer = make(eval_dataset=HELD_OUT, truncated_sampling="ignore", **options)
    expected = trainer.evaluate(temperature=temperature)
    flags = [f"--{key}={value}" for key, value in options.items()]
    flags += [] if temperature is None else [f"--temperature={temperature}"]
    said = evaluated(
        tmp_path, model_path, "--dataset_name", data, "--max_completion_length=6", *flags
    )
    finite = {key: None if math.isnan(x) else x for key, x in expected.items()}
    assert said["metrics"] == finite
    assert said["prompts"] == {"": 9}
    shown = capsys.readouterr().out
    for name in {"eval_reward", "eval_greedy_reward"} & finite.keys():
        assert f"{finite[name]:.4g} ±" in shown
    assert "9 prompts" in shown
    for name, is_there in {"sampled": temperature != 0, "greedy": not temperature}.items():
        assert (name in shown) == (name in said["completions"]) == is_there
    assert ("eval_success_threshold" in shown) == (temperature != 0)  # no completion reaches 1


def test_run_directory_brings_model_and_keys(make, tmp_path, data) -> None:
    trainer = make(max_steps=1, temperature=0.7, learning_rate=0.05, use_peft=True, lora_r=2)
    trainer.train()
    after = trainer.evaluate(HELD_OUT)
    said = evaluated(tmp_path, str(tmp_path / "run"), "--dataset_name", data)
    assert said["config"]["temperature"] == 0.7
    assert said["model"] == str(tmp_path / "run" / "final")
    finite = {key: pytest.approx(x, nan_ok=True) for key, x in after.items()}
    assert {k: math.nan if x is None else x for k, x in said["metrics"].items()} == finite


@pytest.mark.parametrize("part", ["final", "best", "checkpoints/step-00000010"])
def test_models_of_a_run_bring_its_config(part, tmp_path) -> None:
    path = tmp_path / part
    path.mkdir(parents=True)
    for file in (path / "state.json", tmp_path / "config.yaml"):
        file.touch()
    assert model_of_run(str(path)) == (str(path), tmp_path / "config.yaml")


def test_recipe_evaluates_what_it_holds_out(model_path, tmp_path, data) -> None:
    recipe = tmp_path / "mine.yaml"
    keys = {"algorithm": "ppo", "max_completion_length": 6, "dataset_name": data}
    keys |= {"dataset_train_split": "train[:2]"}  # of other data than those of the flag
    held_out = {"eval_dataset_name": [data], "model_name_or_path": model_path, "eval_steps": 5}
    recipe.write_text(json.dumps(keys | held_out))
    HELD_OUT.select(range(4)).to_json(tmp_path / "other.jsonl")
    assert evaluated(tmp_path, str(recipe))["prompts"] == {"": 9}
    chosen = evaluated(
        tmp_path, "--config", str(recipe), "--dataset_name", f"{tmp_path}/other.jsonl"
    )
    assert chosen["prompts"] == {"": 4}


def recipe_of(tmp_path: Path, model: str, data: str, **keys: object) -> str:
    """A recipe with data of its own."""
    recipe = {"algorithm": "grpo", "max_completion_length": 6, "model_name_or_path": model}
    (tmp_path / "own.yaml").write_text(json.dumps(recipe | {"dataset_name": data} | keys))
    return str(tmp_path / "own.yaml")


def test_another_seed_draws_no_other_share(model_path, tmp_path, data, capsys) -> None:
    recipe = recipe_of(tmp_path, model_path, data, dataset_test_split=0.4, seed=3)
    said = refused(capsys, "eval", recipe, "--seed", "7")
    assert "dataset_test_split 0.4 was split off by seed 3" in said
    assert evaluated(tmp_path, recipe, "--seed", "3")["prompts"] == {"": 4}
    chosen = evaluated(tmp_path, recipe, "--seed", "7", "--eval_dataset_name", data)
    assert chosen["prompts"] == {"": 9}


def test_run_directory_of_supervised_training_is_a_model(model_path, tmp_path, data) -> None:
    run = tmp_path / "sft"
    shutil.copytree(model_path, run / "final")
    (run / "config.yaml").write_text("algorithm: sft\n")
    said = evaluated(tmp_path, str(run), "--dataset_name", data, "--max_completion_length=6")
    assert said["model"] == str(run / "final")


def test_interval_is_196_standard_errors() -> None:
    found = intervals({"eval_reward": 0.5, "eval_reward_stderr": 0.1, "eval_x_stderr": 0.1})
    assert found == {"eval_reward": pytest.approx((0.3040036, 0.6959964))}
    assert intervals({"eval_reward": 0.5, "eval_reward_stderr": math.nan}) == {}


def test_names_are_escaped_for_the_terminal(capsys) -> None:
    name = "\x1b]0;owned\x07[red]"
    metrics = {f"eval_{name}_rewards/{name}/mean": 0.5}
    out = StringIO()
    Console(file=out, width=120).print(*tables(metrics, [name]))
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count(r"\x1b]0;owned\x07[red]") == 2
    with explaining_errors():
        logging.lastResort.emit(logging.makeLogRecord({"msg": name, "levelno": logging.WARNING}))
        say(name)
    shown = capsys.readouterr()
    assert shown.out == shown.err == "\\x1b]0;owned\\x07[red]\n"


def test_table_of_several_sets_has_their_names_and_mean() -> None:
    metrics = {"eval_a_reward": 0.1, "eval_a_greedy_reward": 0.2, "eval_a_reward_stderr": 0.05}
    metrics |= {"eval_a_b_reward": 0.3, "eval_reward": 0.25, "eval_a_b_frac_reward_zero_std": 1.0}
    out = StringIO()
    Console(file=out, width=60).print(*tables(metrics, ["a", "a_b"]), sep="\n")
    rows = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells == [
        ["reward", "0.1 ± 0.098", "0.2"],
        ["reward", "0.3", ""],
        ["reward", "0.25", ""],
    ]
    titles = [line for line in out.getvalue().splitlines() if "sampled" in line]
    assert [title.split()[1] for title in titles] == ["a", "a_b", "mean"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "eval needs a model"),
        (["{run}"], "an unfinished run"),
        (["{model}"], "eval_dataset: set dataset_name"),
        (["{run}/best", "--reward_funcs", "nothing.py:f"], "no model directory"),
        (["{model}", "--json", "{run}/no/out.json"], "cannot be written"),
        (["{model}", "--tempreature", "1"], "tempreature"),
    ],
)
def test_wrong_usage_is_one_message(flags, said, tmp_path, model_path, capsys) -> None:
    run = tmp_path / "begun"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: grpo\n")
    flags = [flag.format(run=run, model=model_path) for flag in flags]
    assert said in refused(capsys, "eval", *flags)
