"""Data and rewards of a run, from arguments or from the keys of its config."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.boundary.user_modules import load
from rlhf_pg.config.files import locate_reward
from rlhf_pg.config.parse import dump, parse
from rlhf_pg.data.inputs import make_sets, resolve_data
from rlhf_pg.rewards.named import name_of, resolve_rewards
from rlhf_pg.trainers.evaluation import Evaluation
from rlhf_pg.trainers.inputs import Inputs
from tests.untimed import untimed

REWARDS = """
def even(completions, **columns):
    return [sum(c in "02468" for c in said) / 4 for said in completions]
"""
SIZES = {
    "max_completion_length": 4,
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_steps": 2,
    "learning_rate": 1e-3,
}


def files(directory: Path, model: str, **keys: object) -> Path:
    """A recipe with data and a reward beside it."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "problems.jsonl").write_text(text)
    (directory / "my_rewards.py").write_text(REWARDS)
    recipe = {
        "model_name_or_path": model,
        "dataset_name": "problems.jsonl",
        "dataset_columns": {"prompt": "question"},
        "reward_funcs": "my_rewards.py:even",
        "output_dir": str(directory / "run"),
    }
    (directory / "mine.yaml").write_text(yaml.safe_dump(recipe | SIZES | keys))
    return directory / "mine.yaml"


def made(recipe: Path, *flags: str) -> GRPOTrainer:
    return GRPOTrainer(args=parse(GRPOConfig, ["--config", str(recipe), *flags]))


def test_own_config_gives_the_same_run_and_refuses_changed_data(model_path, tmp_path, monkeypatch):
    recipe = files(tmp_path, model_path, dataset_test_split=0.25, eval_steps=1)
    made(recipe).train()
    monkeypatch.chdir(tmp_path.parent)  # names are absolute
    again = made(tmp_path / "run" / "config.yaml", "--output_dir", str(tmp_path / "again"))
    again.train()
    assert untimed(tmp_path / "again") == untimed(tmp_path / "run")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["task"] is None
    assert saved["dataset_name"] == [str(tmp_path / "problems.jsonl")]
    assert saved["reward_funcs"] == [f"{tmp_path / 'my_rewards.py'}:even"]
    assert saved["dataset_fingerprint"] == again.train_prompts.fingerprint
    assert untimed(tmp_path / "run")[0]["rewards/even/mean"] is not None
    with (tmp_path / "problems.jsonl").open("a") as file:
        file.write('{"question": "1+1=", "answer": "2"}\n')
    with pytest.raises(ValueError, match="not dataset_fingerprint"):
        made(tmp_path / "run" / "config.yaml")
    named = ("--dataset_name", str(tmp_path / "problems.jsonl"))
    assert len(made(tmp_path / "run" / "config.yaml", *named).train_prompts) == 10


def test_python_takes_dicts_and_several_evaluation_sets(model_path, tmp_path):
    def even(completions, **columns):
        return [float(said[:1] in "02468") for said in completions]

    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    sets = {"easy": rows[:2], "hard": Dataset.from_list(rows[2:])}
    assert list(make_sets({"none": None} | sets, GRPOConfig(prompt_template="q"))) == [*sets]
    trainer = GRPOTrainer(
        model=model_path,
        reward_funcs=even,
        args=GRPOConfig(
            prompt_template="{question}", output_dir=str(tmp_path / "run"), eval_steps=2, **SIZES
        ),
        train_dataset=rows,
        eval_dataset=sets,
    )
    assert trainer.train_prompts.rows["prompt"] == [row["question"] for row in rows]
    metrics = trainer.evaluate()
    own = [metrics[f"eval_{name}_reward"] for name in sets]
    assert metrics["eval_reward"] == pytest.approx(sum(own) / 2)
    assert metrics["eval_easy_reward"] == trainer.evaluate(sets["easy"])["eval_reward"]
    alone = trainer.evaluate({"easy": sets["easy"]})
    assert alone["eval_reward"] == alone["eval_easy_reward"] == metrics["eval_easy_reward"]
    recorded = trainer.resolved_args()
    assert (recorded.task, recorded.dataset_name) == (None, ())
    assert recorded.reward_funcs == ("python:even",)  # which no name finds


def total(completions, **columns):
    return [0.0 for _ in completions]


ROWS = [{"prompt": "1+1="}]
OWN = {"reward_model_name_or_path": None, "reward_options": {}}
TOTAL = locate_reward(f"{__name__}:total", None)
OWN |= {"reward_funcs": (TOTAL,)}


@pytest.mark.parametrize(
    ("keys", "given", "recorded"),
    [
        ({"task": "arithmetic"}, (), {}),
        ({"task": "arithmetic"}, total, OWN),
        ({"reward_funcs": "exact"}, (), {}),
        ({"reward_funcs": "exact", "reward_options": {"exact": {}}}, total, OWN),
        ({"reward_model_name_or_path": "judge"}, [total], OWN),
    ],
)
def test_config_claims_no_reward_that_was_not_used(keys, given, recorded):
    assert resolve_rewards(given, GRPOConfig(**keys))[2] == recorded


def test_names_find_rewards_again_or_say_that_nothing_does(tmp_path, monkeypatch):
    def of_script(completions, **columns):
        return [0.0 for _ in completions]

    of_script.__module__ = "__main__"  # to import a script by its name would run it again
    monkeypatch.setattr(sys.modules["__main__"], "of_script", of_script, raising=False)
    (tmp_path / "mine.py").write_text(REWARDS)
    functions = [load(f"{tmp_path}/mine.py:even"), total, json.dumps, lambda **_: [], str, "a/b"]
    assert tuple(map(name_of, functions)) == (
        *(f"{tmp_path}/mine.py:even", TOTAL, "json:dumps", "python:<lambda>"),
        *("python:str", "model:a/b"),
    )
    assert load(TOTAL) is total
    assert name_of(of_script) == "python:of_script"
    args = GRPOConfig(reward_funcs=("python:<lambda>", "python:<lambda>"))
    with pytest.raises(ValueError, match="a reward that was given in Python"):
        resolve_rewards((), args)


@pytest.mark.parametrize(
    ("keys", "given", "message"),
    [
        ({"dataset_name": "a/b"}, {}, "twice, as train_dataset and dataset_n"),
        ({"task": "arithmetic"}, {}, "twice, as train_dataset and task"),
        ({"eval_dataset_name": "a/b"}, {"eval_dataset": ROWS}, "twice, as eval_dataset"),
        ({}, {"train_dataset": [{"a": 1}, {"a": "b"}]}, "train_dataset: the list cannot become a"),
    ],
)
def test_data_that_cannot_be_used_are_one_error(keys, given, message):
    with pytest.raises(ValueError, match=message):
        resolve_data(GRPOConfig(**keys), **{"train_dataset": ROWS} | given)


def test_list_has_the_columns_of_all_its_rows():
    data = resolve_data(GRPOConfig(), [{"prompt": "a"}, {"prompt": "b", "answer": "3"}])[1]
    assert data["answer"] == [None, "3"]


def test_evaluation_data_by_name_stand_beside_training_data_in_python(tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "2+2="}\n')
    args = GRPOConfig(eval_dataset_name=str(tmp_path / "held.jsonl"))
    assert resolve_data(args, ROWS)[2][""]["prompt"] == ["2+2="]


def test_task_by_name_brings_data_and_reward():
    args = GRPOConfig(task="arithmetic")
    task, train, sets = resolve_data(args)
    assert "prompt" in train.column_names
    assert len(sets[""]) == 1091
    assert [reward.__name__ for reward in resolve_rewards((), args, task.reward)[0]] == [
        "exact_match"
    ]


def test_arguments_in_python_are_recorded_and_needed_again(model_path, tmp_path):
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    recipe = files(tmp_path, model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    args = parse(GRPOConfig, ["--config", str(recipe)])
    inputs = {"model": model, "optimizers": (optimizer(model.parameters()), None)}
    recorded = GRPOTrainer(args=args, **inputs).resolved_args()
    assert recorded.given_in_python == ("optimizers",)
    again = replace(args, given_in_python=("optimizers", "tools"))
    with pytest.raises(ValueError, match="was given tools in Python: give the same"):
        GRPOTrainer(args=again, **inputs)
    assert GRPOTrainer(args=args).resolved_args().given_in_python == ()
    dump(recorded, tmp_path / "recorded.yaml")
    with pytest.raises(ValueError, match="was given optimizers in Python: give the same"):
        made(tmp_path / "recorded.yaml")
    assert made(tmp_path / "recorded.yaml", "--given_in_python").args.given_in_python == ()
    with pytest.raises(ValueError, match="was given tools in Python"):
        Evaluation(None, (), again)
    assert Evaluation(None, (), recorded).resolved_args().given_in_python == ()


def test_arguments_that_say_nothing_are_not_given():
    inputs = Inputs(tools=[], environment_factory=object, peft_config={"r": 1}, value_model=None)
    assert inputs.optimizers == (None, None)
    assert inputs.given_in_python(GRPOConfig()) == ("environment_factory", "peft_config")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_name": []}, "train_dataset: set dataset_name"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"eval_steps": 1}, "eval_steps needs an eval_dataset"),
        (
            {"system_prompt": "Be brief.", "chat_template_kwargs": {"tools": []}},
            "multiple values for keyword argument 'tools'",
        ),
    ],
)
def test_missing_input_raises(model_path, tmp_path, keys, message):
    recipe = files(tmp_path, model_path, **{"dataset_columns": {"prompt": "question"}} | keys)
    text = yaml.safe_load(recipe.read_text())
    if not text["dataset_name"]:
        text.pop("dataset_columns")
    recipe.write_text(yaml.safe_dump(text))
    with pytest.raises(ValueError, match=message):
        made(recipe)


def test_chat_template_arguments_reach_the_prompt(model_path, tmp_path):
    keys = {"apply_chat_template": True, "chat_template_kwargs": {"add": "9"}}
    trainer = made(files(tmp_path, model_path, **keys))
    template = "{{ add }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = trainer.processing_class
    tokenizer.chat_template = template
    trainer = GRPOTrainer(args=trainer.args, processing_class=tokenizer)
    assert tokenizer.decode(trainer.train_prompts.tokens[0]) == "90+1="
