"""The embedded default: its problems, its tokenizer, its model and the warm start."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.models.loading import load_tokenizer
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import TASKS, Demonstration, arithmetic, calculator, guess
from rlhf_pg.tasks.arithmetic import exact_match
from rlhf_pg.tasks.tiny import character_tokenizer
from rlhf_pg.tasks.warm_start import ensure_model, examples, warm_start

FIRST = [(0, 13), (0, 22), (0, 25)]
SPECIAL = {"<pad>": 0, "<eos>": 1, "<user>": 2, "<assistant>": 3}


@pytest.fixture(scope="module")
def task():
    return arithmetic()


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer("0123456789+-*= ?")


def summands(dataset):
    return [tuple(map(int, re.fullmatch(r"(\d+)\+(\d+)=", p).groups())) for p in dataset["prompt"]]


def test_splits_share_no_unordered_sum_and_cover_all_sums(task):
    train, held_out = (summands(d) for d in (task.train_dataset, task.eval_dataset))
    assert {frozenset(p) for p in train}.isdisjoint(frozenset(p) for p in held_out)
    every = sorted((a, b) for a in range(100) for b in range(100))
    assert sorted([*train, *held_out]) == every  # each once
    assert held_out[:3] == FIRST  # in every process and every run


def test_every_answer_is_correct_without_extra_columns(task):
    for data in (task.train_dataset, task.eval_dataset):
        assert set(data.column_names) == {"prompt", "answer"}
        assert data["answer"] == [str(a + b) for a, b in summands(data)]


def test_exact_match_accepts_only_exact_answer():
    said = ["85", "085", "85 ", "8", "", "58", "=85", "85"]
    answers = ["85"] * 7 + ["86"]
    prompts = ["17+68="] * 8
    assert exact_match(prompts, said, answer=answers, completion_ids=[[]] * 8) == [1, *[0] * 7]


def test_only_answer_and_eos_have_labels(task, tokenizer):
    demonstrations = task.demonstrations()
    assert len(demonstrations) == len(task.train_dataset)
    rows = task.train_dataset[:300:30]
    encoded = examples(demonstrations[:300:30], tokenizer)
    for prompt, answer, example in zip(rows["prompt"], rows["answer"], encoded, strict=True):
        ids, labels = example["input_ids"], example["labels"]
        assert tokenizer.decode(ids) == f"{prompt}{answer}<eos>"
        assert labels[: len(prompt)] == [-100] * len(prompt)
        assert labels[len(prompt) :] == ids[len(prompt) :]


def test_two_step_warm_start_begins_at_its_seed_and_loads_with_lower_loss(tmp_path, monkeypatch):
    def few(demonstrations, *given):
        return examples(demonstrations[:256], *given)

    monkeypatch.setattr("rlhf_pg.tasks.warm_start.examples", few)
    steps = {"max_steps": 2, "batch_size": 8, "learning_rate": 3e-3, "save_steps": 0, "seed": 3}
    args = SFTConfig(task="arithmetic", output_dir=str(tmp_path), **steps)
    final = warm_start(args)
    assert final == tmp_path / "final"
    model, tokenizer = (
        kind.from_pretrained(final) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert load_tokenizer(None, model).get_vocab() == tokenizer.get_vocab()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    torch.manual_seed(args.seed)
    untrained, _ = arithmetic().new_model()
    for p, q in zip(model.parameters(), untrained.parameters(), strict=True):
        assert 0 < (p - q).abs().max() < 0.01  # two steps of Adam

    losses = [line["loss"] for line in read(tmp_path / "metrics.jsonl")]
    assert losses[1] < losses[0] - 0.05


def test_warm_start_has_the_dtype_of_its_config(tmp_path):
    args = SFTConfig(task="arithmetic", output_dir=str(tmp_path), max_steps=1, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(warm_start(args))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("task", list(TASKS))
def test_each_task_is_warm_started_once_with_own_recipe(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    calls = []

    def train(command, env, check):
        calls.append((command, env))
        final = tmp_path / parse(SFTConfig, command[3:]).output_dir / "final"
        final.mkdir(parents=True)
        (final / "model.safetensors").touch()

    monkeypatch.setattr("subprocess.run", train)
    path = f"runs/sft_{task}/final"
    assert [ensure_model(task, None) for _ in range(2)] == [path, path]
    [(command, env)] = calls
    assert command[1:3] == ["-m", "rlhf_pg.tasks.warm_start"]
    assert parse(SFTConfig, command[3:]).task == task
    assert "RANK" not in env
    assert ensure_model(task, "org/model") == "org/model"


def test_only_demonstrated_turns_have_labels():
    task = guess()
    _, tokenizer = task.new_model()
    shown = Demonstration("1-9:", ["5", "12", "6"], [">", "<"])
    [example] = examples([shown], tokenizer)
    assert tokenizer.decode(example["input_ids"]) == "1-9:5<eos>>12<eos><6<eos>"
    learnt = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(learnt) == "5<eos>12<eos>6<eos>"
    assert [i for i, label in enumerate(example["labels"]) if label == -100] == [0, 1, 2, 3, 6, 10]


def test_chat_demonstration_is_rendered_as_in_play():
    task = calculator()
    _, tokenizer = task.new_model()
    answers = [[{"role": "tool", "content": "42"}]]
    shown = Demonstration([{"role": "user", "content": "6*7"}], ["<tool_call>", "42"], answers)
    [example] = examples([shown], tokenizer, [get_json_schema(task.tools[0])])
    row = "<tools>calculate<user>6*7<assistant><tool_call><eos><tool>42<assistant>42<eos>"
    assert tokenizer.decode(example["input_ids"]) == row
    learnt = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(learnt) == "<tool_call><eos>42<eos>"


def test_last_guess_is_paid():
    assert guess().reward(["1-9:"] * 2, ["5<9>6", "6"], answer=["6", "9"]) == [1, 0]


def test_calculator_problems_are_held_out():
    task = calculator()
    keys = [
        {str(prompt) for prompt in data["prompt"]}
        for data in (task.train_dataset, task.eval_dataset)
    ]
    assert not keys[0] & keys[1]
    assert len(keys[1]) == len(task.eval_dataset) == 256


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_demonstrations_fit_model(name):
    task = TASKS[name]()
    _, tokenizer = task.new_model()
    shown = task.demonstrations()
    assert shown == task.demonstrations()
    assert all(len(turns) == len(answers) + 1 for _, turns, answers in shown)
    assert len({len(turns) for _, turns, _ in shown}) > 1
    tools = [get_json_schema(tool) for tool in task.tools]
    longest = max(len(x["input_ids"]) for x in examples(shown[:500], tokenizer, tools))
    assert longest <= 64
